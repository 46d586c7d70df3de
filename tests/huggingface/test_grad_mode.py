"""Grad modes and checkpoints inside a model's own forward: gradients are those of the unpatched model."""

import copy

import pytest
import torch
from comparison import assert_close, assert_same_run, batch, train
from families import tiny_model
from test_deferred import VOCABULARY, Model, ce, check, run
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from liger_entropy.huggingface import apply_liger_entropy

OTHER = torch.linspace(-1, 1, 80).view(2, 5, 8)  # hidden states of a second pass


def metric(mode):
    def loss(z, y, m):
        with mode():
            accuracy = (z.argmax(-1) == y).float().mean()
        return ce(z, y) * (1 + accuracy)

    return loss


def halved(z, y, m):
    with torch.no_grad():
        other = z / 2
    return ce(z, y) + F.mse_loss(z, other)


def perplexity(z, y, m):
    with torch.no_grad():
        scale = F.cross_entropy(z.transpose(1, 2), y).exp()
    return scale * ce(z, y)


def teacher(z, y, m):
    with torch.no_grad():
        other = m.lm_head(m.body(OTHER))
    return ce(z, y) * (1 + other.square().mean())


def teachers_loss(z, y, m):
    with torch.no_grad():
        other = m.lm_head(m.body(OTHER))
    return ce(other, y) + m.body(OTHER).sum()


@pytest.mark.parametrize(
    "loss, fused",
    [
        (metric(torch.no_grad), False),
        (metric(torch.inference_mode), False),
        (halved, False),
        (teacher, True),
        (teachers_loss, False),
    ],
)
def test_other_grad_mode_inside_the_forward(loss, fused):
    check(loss, fused=fused)


def test_entropy_is_that_of_the_loss_and_not_of_a_metric():
    assert check(perplexity, fused=False)["entropy_loss"].requires_grad


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_whole_forward_under_one_mode_is_fused(mode):
    torch.manual_seed(0)
    plain = Model(lambda z, y, m: ce(z / 2, y), True)
    model = apply_liger_entropy(copy.deepcopy(plain))
    labels = torch.zeros(2, 5, dtype=torch.long)
    with mode():
        assert_close(model(OTHER, labels=labels)["loss"], plain(OTHER, labels=labels)["loss"])
    assert not model._liger_entropy.noted


def checkpointed(reentrant):
    def loss(z, y, m):
        hidden = m.body(OTHER)
        return checkpoint(lambda h: ce(m.lm_head(h), y), hidden, use_reentrant=reentrant)

    return loss


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_around_head_and_loss(reentrant):
    check(checkpointed(reentrant), fused=False)
    with pytest.raises(RuntimeError, match="cannot be applied to its loss"):
        run(checkpointed(reentrant), entropy_coef=0.1)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_around_the_whole_model_is_fused(reentrant):
    """The recomputation defers as the first pass did."""
    torch.manual_seed(0)
    model = apply_liger_entropy(Model(lambda z, y, m: ce(z, y), True), entropy_coef=0.3)
    labels = torch.arange(10).view(2, 5) % VOCABULARY
    gradients = []
    for call in (model, lambda h, **kw: checkpoint(lambda h: model(h, **kw)["loss"], h, use_reentrant=reentrant)):
        hidden = OTHER.clone().requires_grad_()
        result = call(hidden, labels=labels)
        (result["loss"] if isinstance(result, dict) else result).backward()
        gradients.append(hidden.grad)
    assert_close(gradients[1], gradients[0])
    assert not model._liger_entropy.noted


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_of_the_layers_is_fused(reentrant):
    runs, inputs = [], batch()
    for checkpoints in (False, True):
        model = apply_liger_entropy(tiny_model("llama"), entropy_coef=0.3)
        if checkpoints:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        runs.append(train(model, inputs, use_cache=False))
        assert not model._liger_entropy.noted
    assert_same_run(runs[1], runs[0])
