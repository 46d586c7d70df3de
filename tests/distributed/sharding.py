"""A problem's shards, and the comparison of what the ranks get with the oracle's full logits in fp64."""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist
from problems import Problem, all_losses, plain_losses, problem, solve
from torch import Tensor

EVERYTHING = dict(
    label_smoothing=0.1, lse_square_scale=0.01, entropy_coef=0.3, softcap=3.0, logit_scale=1.3,
    names=("linear_bias", "weight", "token_weight", "temperature"),
)  # fmt: skip
# Rows per rank of a vocabulary of 10.
SPLITS = {2: [(10, 0), (0, 10), (4, 6)], 3: [(4, 4, 2), (0, 10, 0), (1, 8, 1), (10, 0, 0)]}


def small(**options) -> Problem:
    """Ten classes; the labels have both ends of the vocabulary and an ignored token."""
    p = double(problem(5, 6, 10, torch.float64, **options))
    p.target = torch.tensor([0, 9, -100, 5, 8])
    return p


def double(p: Problem) -> Problem:
    """Weights and temperatures too, whose gradients would be rounded otherwise."""
    p.options = {n: v.double() if isinstance(v, Tensor) else v for n, v in p.options.items()}
    return p


def rows_of(split, rank: int) -> slice:
    return slice(sum(split[:rank]), sum(split[: rank + 1]))


def shard(p: Problem, rows: slice, group, **more) -> Problem:
    options = dict(p.options)
    if "linear_bias" in options:
        options["linear_bias"] = options["linear_bias"][rows]
    return Problem(p.target, p.input, p.linear_weight[rows], options=options | {"process_group": group} | more)


def same(name: str, ours: Tensor, expected: Tensor, rtol=1e-11, atol=1e-12) -> None:
    torch.testing.assert_close(ours, expected, rtol=rtol, atol=atol, msg=lambda m: f"{name}: {m}")


def same_everywhere(name: str, tensor: Tensor, group) -> None:
    """Bit for bit."""
    others = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(others, tensor.contiguous(), group=group)
    assert all(torch.equal(other, tensor) for other in others), f"{name} differs between the ranks: {others}"


def check_shard(p: Problem, rows: slice, group, ours=all_losses, plain=plain_losses, compute=None, **more) -> None:
    """Values and all gradients of a rank, whose shard is `rows`, against the whole problem's."""
    expected = solve(plain, p)
    got = solve(functools.partial(ours, compute=compute), shard(p, rows, group, **more))
    for name, value in got.values.items():
        same(name, value, expected.values[name])
        same_everywhere(name, value, group)
    for name, gradient in got.gradients.items():
        whole = expected.gradients[name]
        same(f"gradient of {name}", gradient, whole[rows] if name in ("linear_weight", "linear_bias") else whole)
    same_everywhere("gradient of input", got.gradients["input"], group)


def refused(call, kind=ValueError) -> str:
    """The message of the error that the call must raise."""
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__} was raised")
