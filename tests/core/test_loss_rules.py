"""What the reductions and weights mean: ignored tokens, class and token weights, z-loss. Cases NUM-13 to NUM-27."""

import math

import pytest
import torch
import torch.nn.functional as F
from problems import problem

from liger_entropy import ComputeOptions, cross_entropy, linear_cross_entropy, linear_token_statistics


def assert_near(ours, exact, rtol=1e-6, atol=1e-7):
    torch.testing.assert_close(ours.double(), exact.double(), rtol=rtol, atol=atol)


@pytest.mark.parametrize("skip_ignored", [True, False])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("ignored", [1, 6])
def test_ignored_rows_take_part(ignored, reduction, label_smoothing, skip_ignored):
    """NUM-13: in the uniform part, the denominator, or through their hidden states."""
    options = dict(reduction=reduction, label_smoothing=label_smoothing, lse_square_scale=0.1, entropy_coef=0.1)
    p = problem(7, 5, 11, ignored=0)
    p.target[:ignored] = -100
    short = linear_cross_entropy(p.input[ignored:], p.linear_weight, p.target[ignored:], **options)
    for scale in (1.0, -50.0):
        x = p.input.clone()
        x[:ignored] *= scale
        x.requires_grad_()
        compute = ComputeOptions(skip_ignored=skip_ignored)
        loss = linear_cross_entropy(x, p.linear_weight, p.target, **options, options=compute)
        assert_near(loss, short)
        loss.backward()
        assert (x.grad[:ignored] == 0).all() and (x.grad[ignored:] != 0).any()


@pytest.mark.parametrize("ignore_index", [-100, -1, 2, 1_000_000])
def test_ignored_label_is_used_as_an_index(ignore_index):
    """NUM-14"""
    h, w = torch.tensor([[1.0, 2.0], [3.0, 0.4]]), torch.eye(2)
    t = torch.tensor([ignore_index, 1])
    options = dict(weight=torch.tensor([0.2, 0.3]), label_smoothing=0.1, ignore_index=ignore_index)
    assert abs(float(linear_cross_entropy(h, w, t, **options)) - 2.5404506) < 1e-6


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("given", [True, False])
def test_class_weights_with_smoothing_follow_another_rule(given, reduction):
    """NUM-15: torch's rule gives 1.676802 for the mean; known wrong ones 2.347523, 1.626833, 1.731212."""
    torch.manual_seed(3)
    z = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    t = torch.tensor([0, 3, -100, 4, -100, 1])
    options = dict(
        weight=torch.tensor([0.5, 2, 1, 3, 0.1], dtype=torch.float64), label_smoothing=0.2, reduction=reduction
    )
    ours = cross_entropy(z, t, **options)
    if not given:
        ours = linear_cross_entropy(z, torch.eye(5, dtype=torch.float64), t, **options)
    exact = F.cross_entropy(z, t, **options)
    if reduction == "mean":
        assert abs(ours.item() - 1.676802) < 1e-6
    upstream = torch.randn(ours.shape, dtype=torch.float64)
    assert_near(ours, exact, 1e-12)
    assert_near(*(torch.autograd.grad(v, z, upstream)[0] for v in (ours, exact)), 1e-12)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_weights_that_sum_to_zero_divide_by_zero(reduction):
    """NUM-16: no weight on any kept token, by class or by token, is a loss of 0 with gradient 0 (torch: NaN)."""
    h, w = torch.randn(2, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    t = torch.tensor([0, 0])
    for options in (dict(weight=torch.tensor([0.0, 1, 1])), dict(token_weight=torch.zeros(2))):
        loss = linear_cross_entropy(h, w, t, reduction=reduction, **options)
        assert (loss == 0).all()
        for grad in torch.autograd.grad(loss.sum(), (h, w)):
            assert (grad == 0).all()


def test_z_loss_averages_over_ignored_tokens():
    """NUM-17"""
    p = problem(8, 5, 11, ignored=0)
    p.target[[0, 2, 3, 5, 7]] = -100
    kept = p.target != -100
    ce, total = (
        linear_cross_entropy(p.input, p.linear_weight, p.target, lse_square_scale=z).double() for z in (0.0, 1e-2)
    )
    lse = (p.input.double() @ p.linear_weight.double().T).logsumexp(-1)
    assert_near(total - ce, 1e-2 * lse[kept].square().mean(), 1e-4)


def test_z_loss_is_computed_from_shifted_logits():
    """NUM-17: the z-loss is the one term that sees a constant added to all logits."""
    p = problem(8, 5, 11, torch.float64, ignored=0)
    bias = torch.full((11,), 100.0, dtype=torch.float64, requires_grad=True)
    out = linear_cross_entropy(
        p.input, p.linear_weight, p.target, linear_bias=bias, lse_square_scale=1e-2, reduction="sum", return_z_loss=True
    )
    z = p.input @ p.linear_weight.T + 100
    assert_near(out.z_loss, 1e-2 * z.logsumexp(-1).square().sum(), 1e-12)
    exact = (2e-2 * z.logsumexp(-1)[:, None] * z.softmax(-1)).sum(0)
    assert_near(torch.autograd.grad(out.z_loss, bias)[0], exact, 1e-10)


@pytest.mark.parametrize("weight", [torch.tensor([1.0, 0, 2, 1, 0.5]), None])
def test_class_weights_scale_the_z_loss_or_the_entropy(weight):
    """NUM-17: Liger's rule leaves the z-loss alone; H speaks of the distribution only."""
    p = problem(8, 5, 5)
    out = linear_cross_entropy(
        p.input, p.linear_weight, p.target, weight=weight, label_smoothing=0.2 if weight is not None else 0.0,
        lse_square_scale=0.3, return_z_loss=True, return_entropy_loss=True,
    )  # fmt: skip
    z = (p.input.double() @ p.linear_weight.double().T)[p.target != -100]
    assert_near(out.z_loss, 0.3 * z.logsumexp(-1).square().mean(), 1e-5)
    assert_near(out.entropy_loss, torch.special.entr(z.softmax(-1)).sum(-1).mean(), 1e-5)


def test_mean_entropy_covers_other_positions_than_the_loss():
    """NUM-25: H is 0 at the kept positions and ln V at the ignored ones."""
    w = torch.eye(4)
    t = torch.tensor([-100, -100, -100, 0, 1, 2])
    h = torch.zeros(6, 4)
    h[[3, 4, 5], [0, 1, 2]] = 1e4
    out = linear_cross_entropy(h, w, t, return_entropy_loss=True)
    assert out.entropy_loss.abs() < 1e-6
    h = torch.where(t[:, None] == -100, 1e4 * F.one_hot(torch.zeros(6, dtype=torch.long), 4), 0.0)
    assert_near(linear_cross_entropy(h, w, t, return_entropy_loss=True).entropy_loss, torch.tensor(math.log(4)))


@pytest.mark.parametrize("skip_ignored", [True, False])
def test_ignored_positions_carry_a_statistic(skip_ignored):
    """NUM-26: exactly 0, prediction -1, and no gradient whatever arrives there."""
    p = problem(6, 5, 11, ignored=0)
    p.target[[1, 3]] = -100
    x = p.input.requires_grad_()
    s = linear_token_statistics(x, p.linear_weight, p.target, options=ComputeOptions(skip_ignored=skip_ignored))
    for value in (s.logprob, s.entropy, s.lse, s.smooth_logprob):
        assert (value[[1, 3]] == 0).all() and (value[[0, 2, 4, 5]] != 0).all()
    assert (s.prediction == -1).nonzero().flatten().tolist() == [1, 3]
    (s.logprob + s.entropy + s.lse + s.smooth_logprob).sum().backward()
    assert (x.grad[[1, 3]] == 0).all() and (x.grad[[0, 2, 4, 5]] != 0).any(dim=1).all()


@pytest.mark.parametrize("skip_ignored", [True, False])
def test_token_weights_scale_the_loss_but_not_the_gradient(skip_ignored):
    """NUM-27: also with class weights and smoothing; a row of weight 0 has gradient 0 exactly, for any loss."""
    p = problem(5, 6, 9, torch.float64, ignored=0)
    p.input[0] *= 1e4
    tw = torch.tensor([0, 0.5, 1, 2, 0], dtype=torch.float64)
    options = dict(weight=torch.rand(9, dtype=torch.float64), label_smoothing=0.1)
    compute = ComputeOptions(skip_ignored=skip_ignored)
    x = p.input.requires_grad_()
    exact = F.cross_entropy(x @ p.linear_weight.T, p.target, reduction="none", **options)
    for reduction in ("none", "sum", "mean"):
        ours = linear_cross_entropy(
            x, p.linear_weight, p.target, token_weight=tw, reduction=reduction, **options, options=compute
        )
        right = tw * exact if reduction == "none" else (tw * exact).sum()
        right = right / (tw * options["weight"][p.target]).sum() if reduction == "mean" else right
        assert_near(ours, right, 1e-12)
        grad, right = (torch.autograd.grad(v.sum(), x, retain_graph=True)[0] for v in (ours, right))
        assert_near(grad, right, 1e-9, 1e-12)
        assert (grad[[0, 4]] == 0).all()


def test_token_weight_of_zero_times_inf_is_nan():
    """NUM-27 with the -inf of NUM-22: a token of weight 0 whose label is masked."""
    z = torch.zeros(2, 3)
    z[0, 0] = -math.inf
    z.requires_grad_()
    loss = cross_entropy(z, torch.tensor([0, 1]), token_weight=torch.tensor([0.0, 1.0]), entropy_coef=0.1)
    loss.backward()
    assert loss.isfinite() and (z.grad[0] == 0).all() and z.grad[1].isfinite().all()


def test_gradient_of_token_weights_is_dropped():
    """NUM-27: token weights are differentiable, through numerator and denominator."""
    p = problem(5, 6, 9, torch.float64, names=("token_weight",))
    tw = p.options["token_weight"].double().requires_grad_()
    loss = linear_cross_entropy(p.input, p.linear_weight, p.target, token_weight=tw)
    nll = F.cross_entropy(p.input @ p.linear_weight.T, p.target, reduction="none")
    w = tw * (p.target != -100)
    assert_near(*(torch.autograd.grad(v, tw)[0] for v in (loss, (w * nll).sum() / w.sum())), 1e-10)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_weight_of_0_has_no_gradient(reduction):
    """Its token contributes nothing, but a larger weight would."""
    p = problem(5, 6, 9, torch.float64, ignored=0)
    tw = torch.tensor([0.0, 1.0, 0.5, 0.0, 2.0], dtype=torch.float64, requires_grad=True)
    loss = linear_cross_entropy(p.input, p.linear_weight, p.target, token_weight=tw, reduction=reduction)
    nll = F.cross_entropy(p.input @ p.linear_weight.T, p.target, reduction="none")
    expected = (tw * nll).sum() / (tw.sum() if reduction == "mean" else 1)
    assert_near(*(torch.autograd.grad(v, tw)[0] for v in (loss, expected)), 1e-10)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.3, 1.0])
def test_ignored_token_has_a_loss_of_negative_zero(label_smoothing):
    p = problem(5, 6, 9)
    p.target[1] = -100
    loss = linear_cross_entropy(p.input, p.linear_weight, p.target, reduction="none", label_smoothing=label_smoothing)
    assert loss[1] == 0 and not loss[1].signbit()
