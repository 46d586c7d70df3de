"""Faults that scripts/mutation_check.py planted and no other test noticed."""

import math
from dataclasses import replace

import pytest
import torch
from problems import check_losses, check_statistics, problem
from torch.nn import functional as F

from liger_entropy import (
    ComputeOptions,
    LigerFusedLinearCrossEntropyLoss,
    apply_liger_entropy,
    linear_cross_entropy,
    linear_token_statistics,
    planner,
)

DENSE = ComputeOptions(skip_ignored=False)


class CutsItsLastPosition(torch.nn.Module):
    """Takes its loss on one position less than there are labels, as older models of transformers do."""

    def __init__(self):
        super().__init__()
        self.embed, self.lm_head = torch.nn.Embedding(9, 4), torch.nn.Linear(4, 9, bias=False)

    def forward(self, input_ids, labels):
        logits = self.lm_head(self.embed(input_ids))
        return {"loss": F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())}


def test_masked_class_of_weight_0_makes_nan_of_the_smoothing():
    """0 * -inf. With the class taken out, the same loss; 1/V is over all classes."""
    bias, class_weight = torch.zeros(7), torch.ones(7)
    bias[3], class_weight[3] = -math.inf, 0.0
    x, w, y = torch.randn(5, 4), torch.randn(7, 4, requires_grad=True), torch.tensor([0, 1, 2, 5, 6])
    options = dict(weight=class_weight, label_smoothing=0.2)
    masked = linear_cross_entropy(x, w, y, linear_bias=bias, **options)
    rest = [0, 1, 2, 4, 5, 6]
    logp = (x @ w[rest].T).log_softmax(-1)
    of_label = logp.gather(1, torch.tensor([0, 1, 2, 4, 5])[:, None])[:, 0]
    torch.testing.assert_close(masked, -(0.8 * of_label + 0.2 * logp.sum(-1) / 7).mean())
    (gradient,) = torch.autograd.grad(masked, w)
    assert gradient.isfinite().all()


@pytest.mark.parametrize("entropy_coef", [0.0, 0.1])
def test_bare_loss_overflows(entropy_coef):
    """Without a prediction the row maximum is found in another way. Logits reach 500, e^89 is the end of fp32."""
    x, w, y = 60 * torch.randn(6, 5), torch.randn(40, 5), torch.randint(40, (6,))
    x.requires_grad_()
    loss = linear_cross_entropy(x, w, y, entropy_coef=entropy_coef)
    exact_x = x.detach().double().requires_grad_()
    logp = (exact_x @ w.double().T).log_softmax(-1)
    exact = F.nll_loss(logp, y) + entropy_coef * (logp.exp() * logp).sum(-1).mean()
    torch.testing.assert_close(loss.double(), exact, rtol=1e-6, atol=0)
    gradients = torch.autograd.grad(loss, x)[0].double(), torch.autograd.grad(exact, exact_x)[0]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("check", [check_losses, check_statistics])
def test_label_at_the_edge_of_a_block_is_counted_in_both(check):
    p = problem(8, 3, 2050, ignored=0.0)
    check(replace(p, target=torch.tensor([0, 1023, 1024, 1025, 2047, 2048, 2049, 1024])))


def test_statistics_of_an_ignored_token_that_is_not_dropped_have_a_gradient():
    x, w = torch.randn(4, 3, requires_grad=True), torch.randn(9, 3)
    s = linear_token_statistics(x, w, torch.tensor([2, -100, 8, -100]), options=DENSE)
    (gradient,) = torch.autograd.grad((s.logprob + 2 * s.entropy + s.lse + s.smooth_logprob).sum(), x)
    assert torch.equal(gradient[[1, 3]], torch.zeros(2, 3))
    assert (gradient[[0, 2]] != 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wide_chunks_of_the_backward_overwrite_themselves(monkeypatch, dtype):
    """Chunks that work in the unwritten end of dw, with logits in pieces; only large problems on a GPU plan them."""
    widths = planner.Widths(logits=1024, gradient=1024, wide=4096)
    monkeypatch.setattr(planner, "chunk_widths", lambda *arguments: widths)
    check_losses(problem(6, 64, 13 * 1024 + 5, dtype, ("linear_bias",), entropy_coef=0.3, label_smoothing=0.1))


def test_token_scaling_reaches_the_entropy():
    x, w, y = torch.randn(6, 4), torch.randn(9, 4), torch.randint(9, (6,))
    module = LigerFusedLinearCrossEntropyLoss(use_token_scaling=True, return_entropy_loss=True)
    logp = F.linear(x, w).log_softmax(-1)
    torch.testing.assert_close(module(w, x, y).entropy_loss, -(logp.exp() * logp).sum(-1).mean())


def test_token_statistics_stand_beside_the_wrong_label():
    """Position t speaks of label t + 1, and the last one of nothing, also where the model cut that position off."""
    model, ids = CutsItsLastPosition(), torch.tensor([[1, 5, 0, 8], [3, 3, 7, 2]])
    logp = F.linear(model.embed(ids), model.lm_head.weight).log_softmax(-1)[:, :-1]
    outputs = apply_liger_entropy(model, token_statistics=True)(input_ids=ids, labels=ids)
    expected = torch.zeros(2, 4), torch.zeros(2, 4)
    expected[0][:, :-1] = logp.gather(-1, ids[:, 1:, None])[..., 0]
    expected[1][:, :-1] = -(logp.exp() * logp).sum(-1)
    torch.testing.assert_close((outputs["token_logprobs"], outputs["token_entropy"]), expected)
