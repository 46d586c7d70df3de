"""A fault of the kernels that scripts/mutation_check.py planted and no other test noticed."""

import pytest
import torch

from liger_entropy import ComputeOptions, linear_cross_entropy


@pytest.mark.parametrize("label", [9, -1])
def test_kernel_lets_a_label_outside_the_vocabulary_pass(label):
    x, w, y = torch.randn(5, 4), torch.randn(9, 4), torch.tensor([0, -100, 8, label, 2])
    with pytest.raises(ValueError, match=f"label {label} at flat position 3"):
        linear_cross_entropy(x, w, y, options=ComputeOptions(backend="triton"))
