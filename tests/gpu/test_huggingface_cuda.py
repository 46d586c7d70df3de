"""Patched Hugging Face models on a CUDA device: counts, host synchronisations, replicas."""

import sys
import warnings
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "huggingface"))
from comparison import assert_same_run, batch, train
from families import tiny_model

from liger_entropy.huggingface import apply_liger_entropy

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
DEVICE = "cuda"
KEPT = int((batch()["labels"][:, 1:] != -100).sum())


def inputs():
    return {name: tensor.to(DEVICE) for name, tensor in batch().items()}


@pytest.fixture
def plain():
    return tiny_model("llama").to(DEVICE)


@pytest.fixture
def model():
    return apply_liger_entropy(tiny_model("llama").to(DEVICE), token_statistics=True)


COUNTS = {
    "int": lambda n: n,
    "float": float,
    "tensor": torch.tensor,
    "float tensor": lambda n: torch.tensor(float(n)),
    "tensor of one element": lambda n: torch.tensor([n]),
    "tensor on the device": lambda n: torch.tensor(n, device=DEVICE),
    "float tensor on the device": lambda n: torch.tensor(float(n), device=DEVICE),
    "tensor of one element on the device": lambda n: torch.tensor([n], device=DEVICE),
}


@pytest.mark.parametrize("form", COUNTS)
def test_count_is_not_taken(plain, model, form):
    """PAT-03: loss, gradients and entropy; twice the kept tokens halve them."""
    items = COUNTS[form](2 * KEPT)
    expected, got = (train(m, inputs(), num_items_in_batch=items) for m in (plain, model))
    assert_same_run(got, expected)
    assert got.outputs.logits is None, "the loss was not fused"
    assert got.outputs.entropy_loss.device.type == DEVICE and got.outputs.entropy_loss.shape == ()
    whole = train(model, inputs()).outputs.entropy_loss
    assert got.outputs.entropy_loss.item() * 2 == pytest.approx(whole.item(), rel=1e-5)


def synchronisations(model, **kwargs):
    """What torch says about each wait of the host for the device in a forward and backward."""
    given = inputs()
    train(model, given, **kwargs)  # compiles kernels
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            train(model, given, **kwargs)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return [f"{w.filename}:{w.lineno}" for w in caught if "synchroniz" in str(w.message)]


@pytest.mark.parametrize("form", ["int", "tensor on the device", "tensor of one element on the device"])
def test_count_is_read_by_the_host(plain, model, form):
    """PAT-03: the step waits no more often with a count than without, and at most once more than unpatched."""
    without, unpatched = synchronisations(model), synchronisations(plain)
    got = synchronisations(model, num_items_in_batch=COUNTS[form](KEPT))
    assert len(got) <= len(without), f"with a count: {got}; without: {without}"
    assert len(got) <= len(unpatched) + 1, f"patched: {got}; unpatched: {unpatched}"


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")
@pytest.mark.parametrize("first", [True, False])
def test_data_parallel_trains_another_model(plain, model, first):
    """nn.DataParallel over two devices: each replica's loss, and the gradients of their mean."""
    wrapped = torch.nn.DataParallel(model if first else plain, device_ids=[0, 1])
    if not first:
        apply_liger_entropy(wrapped)
    reference = tiny_model("llama").to(DEVICE)
    rows = [{name: tensor[i : i + 1] for name, tensor in inputs().items()} for i in range(2)]
    losses = torch.stack([reference(**row).loss for row in rows])
    losses.mean().backward()
    outputs = wrapped(**inputs(), use_cache=False)  # gather knows no cache
    torch.testing.assert_close(outputs.loss.detach(), losses.detach(), rtol=1e-5, atol=1e-6)
    assert outputs.logits is None, "the loss was not fused"
    outputs.loss.mean().backward()
    for (name, p), q in zip(wrapped.module.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
