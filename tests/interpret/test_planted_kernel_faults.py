"""Faults of the kernels that scripts/mutation_check.py planted and no other test noticed."""

import math

import pytest
import torch
from problems import check_losses, given, problem

from liger_entropy import ComputeOptions, backends, cross_entropy, linear_cross_entropy

# The interpreter computes with numpy, which warns of the log 0 and exp overflow that the kernels select away.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
TRITON = ComputeOptions(backend="triton")
BLOCK = backends.get("triton").BLOCK_COLUMNS


@pytest.mark.parametrize("label", [9, -1])
def test_kernel_lets_a_label_outside_the_vocabulary_pass(label):
    x, w, y = torch.randn(5, 4), torch.randn(9, 4), torch.tensor([0, -100, 8, label, 2])
    with pytest.raises(ValueError, match=f"label {label} at flat position 3"):
        linear_cross_entropy(x, w, y, options=TRITON)


@pytest.mark.parametrize("names", [(), ("weight",)])
def test_blocks_of_given_logits_are_merged_wrongly(names):
    """One program takes several blocks of them, whose maxima rise and fall."""
    p = given(problem(6, 4, 3 * BLOCK + 5, names=names, ignored=0.0, label_smoothing=0.2, entropy_coef=0.3))
    for block, height in enumerate((0.0, 4.0, -4.0, 8.0)):
        p.logits[:3, block * BLOCK :][:, :BLOCK] += height
    check_losses(p, TRITON)


@pytest.mark.parametrize("first", [5, BLOCK + 5])
def test_prediction_is_not_the_first_of_equals_in_several_blocks(first):
    z = torch.randn(4, 3 * BLOCK)
    z[:, [first, 2 * BLOCK + 1]] = 50.0
    out = cross_entropy(z, torch.arange(4), return_predicted_tokens=True, options=TRITON)
    assert out.predicted_tokens.tolist() == [first] * 4


def test_partials_beyond_one_tile_of_the_last_kernel_are_merged_wrongly(monkeypatch):
    """128 partials fit a tile: 131072 classes of a GPU's chunks. Here two do."""
    monkeypatch.setattr(backends.get("triton"), "FINISH_BLOCKS", 2)
    p = problem(5, 4, 4 * BLOCK + 7, names=("weight",), label_smoothing=0.2, entropy_coef=0.3)
    for block, height in enumerate((0.0, 1.0, 3.0, 0.5, 6.0)):
        p.linear_weight[block * BLOCK :][:BLOCK] *= height
    check_losses(p, TRITON)


@pytest.mark.parametrize("cell", [math.nan, math.inf, -math.inf])
def test_row_without_an_upstream_gradient_has_one(cell):
    """0 times the NaN that its softmax is."""
    z = torch.randn(4, 9)
    z[2] = cell
    z.requires_grad_()
    loss = cross_entropy(z, torch.arange(4), entropy_coef=0.3, reduction="none", options=TRITON)
    (gradient,) = torch.autograd.grad(loss[[0, 1, 3]].sum(), z)
    assert torch.equal(gradient[2], torch.zeros(9)) and gradient.isfinite().all()
