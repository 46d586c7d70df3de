"""linear_token_statistics(fields=...): statistics that nobody asked for are not made."""

import pytest
import torch
from problems import STATISTICS, problem

from liger_entropy import ComputeOptions, linear_token_statistics


def statistics(p, **arguments):
    return linear_token_statistics(p.input, p.linear_weight, p.target, options=ComputeOptions(), **arguments)


@pytest.mark.parametrize(
    "names", [(), ("entropy",), ("smooth_logprob",), ("prediction",), ("logprob", "entropy")], ids=str
)
def test_fields_change_a_value_or_come_unasked(names):
    p = problem((3, 4), 5, 1100)
    some, everything = statistics(p, fields=names), statistics(p)
    for name in STATISTICS:
        value = getattr(some, name)
        if name in (*names, "logprob", "lse"):
            assert torch.equal(value, getattr(everything, name)), name
        else:
            assert value.numel() == 0 and not value.requires_grad, name


def test_names_that_can_be_read_once_are_lost():
    p = problem(3, 4, 7)
    assert statistics(p, fields=(name for name in ("entropy",))).entropy.numel() == 3


def test_unknown_field_is_ignored():
    with pytest.raises(TypeError, match=r"fields: .* string 'entropy'"):
        statistics(problem(3, 4, 9), fields="entropy")
    with pytest.raises(ValueError, match=r"fields: .* got 'entropi'"):
        statistics(problem(3, 4, 7), fields=("entropi",))


def test_gradient_needs_a_field_that_was_not_asked_for():
    """The gradient of lse alone, where entropy was not made."""
    p = problem(6, 5, 40).leaves()
    (some,) = torch.autograd.grad(statistics(p, fields=()).lse.sum(), p.input)
    (everything,) = torch.autograd.grad(statistics(p).lse.sum(), p.input)
    assert torch.equal(some, everything)
