"""Beside Liger's own Triton kernels, both in the interpreter: the same outputs and gradients."""

import pytest
import torch

import liger_entropy

functional = pytest.importorskip("liger_kernel.transformers.functional")
TRITON = liger_entropy.ComputeOptions(backend="triton")
MORE = dict(return_z_loss=True, return_token_accuracy=True, return_predicted_tokens=True)
# Liger's class weights and softcap do not run in the interpreter; they are compared with plain torch in tests/core.
CALLS = {
    "plain": {},
    "sum": dict(reduction="sum"),
    "none": dict(reduction="none"),
    "z-loss": dict(lse_square_scale=1e-2),
    "smoothing": dict(label_smoothing=0.1),
    "token scaling": dict(use_token_scaling=True),
    "token scaling, z-loss, sum": dict(use_token_scaling=True, lse_square_scale=1e-2, reduction="sum"),
    "ignore 3": dict(ignore_index=3),
    "all": dict(label_smoothing=0.1, lse_square_scale=1e-2, reduction="sum"),
}


def outputs(function, tensors, **options):
    leaves = [t.clone().requires_grad_(t.is_floating_point()) for t in tensors]
    out = function(*leaves, **options, **MORE)
    grads = torch.autograd.grad(out.loss.sum(), [leaf for leaf in leaves if leaf.requires_grad])
    return [out.loss, out.z_loss, out.token_accuracy, out.predicted_tokens, *grads]


@pytest.mark.parametrize("name", CALLS)
def test_fused_loss_differs_from_liger(name):
    tensors = torch.randn(6, 8), torch.randn(37, 8), torch.tensor([3, -100, 0, 36, 3, 7]), torch.randn(37)
    if CALLS[name].get("ignore_index") == 3:
        tensors[2][1] = 3
    ours = outputs(liger_entropy.liger_fused_linear_cross_entropy, tensors, **CALLS[name], options=TRITON)
    theirs = outputs(functional.liger_fused_linear_cross_entropy, tensors, **CALLS[name])
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [n for n in CALLS if "scaling" not in n])
def test_loss_on_logits_differs_from_liger(name):
    tensors = 2 * torch.randn(6, 37), torch.tensor([3, -100, 0, 36, 3, 7])
    if CALLS[name].get("ignore_index") == 3:
        tensors[1][1] = 3
    ours = outputs(liger_entropy.liger_cross_entropy, tensors, **CALLS[name], options=TRITON)
    theirs = outputs(functional.liger_cross_entropy, tensors, **CALLS[name])
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
