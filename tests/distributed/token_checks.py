"""Tokens spread over ranks: data and sequence parallel."""

from __future__ import annotations

import contextlib
import io
import runpy
from pathlib import Path

import torch
import torch.distributed as dist
from problems import Problem, all_losses, plain_losses, problem, solve
from ranks import Ranks, on
from sharding import EVERYTHING, double, refused, same, same_everywhere

from liger_entropy import LigerFusedLinearCrossEntropyLoss, linear_cross_entropy

# Tokens of each rank, all but the last two of which are kept; the last rank of three keeps none.
COUNTS = {2: (5, 15), 3: (5, 15, 2)}


def _parts(ranks: Ranks, **options) -> tuple[Problem, Problem]:
    """The whole problem and this rank's tokens of it."""
    counts = COUNTS[ranks.size]
    whole = double(problem(sum(counts), 6, 10, torch.float64, ignored=0.0, **options))
    ends = torch.tensor(counts).cumsum(0)
    for end in ends:
        whole.target[end - 2 : end] = -100
    mine = slice(int(ends[ranks.rank]) - counts[ranks.rank], int(ends[ranks.rank]))
    per_token = {n: whole.options[n][mine] for n in ("token_weight", "temperature") if n in whole.options}
    return whole, Problem(whole.target[mine], whole.input[mine], whole.linear_weight, options=whole.options | per_token)


def _averaged(tensor: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """As DDP leaves it."""
    dist.all_reduce(tensor, group=ranks.group)
    return tensor / ranks.size


@on(2, 3)
def mean_over_all_tokens_is_a_mean_of_means(ranks: Ranks):
    """The value and, after averaging over the ranks, every gradient are those of one process with all tokens."""
    for reduction in ("mean", "sum"):
        whole, mine = _parts(ranks, reduction=reduction, **EVERYTHING)
        expected = solve(plain_losses, whole)
        got = solve(
            lambda p: {k: v for k, v in all_losses(p).items() if k != "predicted_tokens"},
            Problem(
                mine.target, mine.input, mine.linear_weight, options=mine.options | {"reduction_group": ranks.group}
            ),
        )
        for name, value in got.values.items():
            same(name, value, expected.values[name])
            same_everywhere(name, value, ranks.group)
        for name in ("linear_weight", "linear_bias"):
            same(f"gradient of {name}", _averaged(got.gradients[name], ranks), expected.gradients[name])
        start = sum(COUNTS[ranks.size][: ranks.rank])
        for name in ("input", "token_weight"):  # no other rank has these, so that the factor is left
            part = expected.gradients[name][start : start + len(mine.target)]
            same(f"gradient of {name}", got.gradients[name] / ranks.size, part)


@on(2, 3)
def ddp_trains_on_a_mean_of_means(ranks: Ranks):
    whole, mine = _parts(ranks, entropy_coef=0.1)
    head = torch.nn.Linear(6, 10, bias=False, dtype=torch.float64)
    torch.nn.init.ones_(head.weight)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = torch.nn.Linear(6, 6, dtype=torch.float64), head
            self.loss = LigerFusedLinearCrossEntropyLoss(entropy_coef=0.1, reduction_group=ranks.group)

        def forward(self, x, y):
            return self.loss(self.head.weight, self.body(x), y)

    model = Model()
    one = linear_cross_entropy(model.body(whole.input), head.weight, whole.target, entropy_coef=0.1)
    expected = torch.autograd.grad(one, list(model.parameters()))
    parallel = torch.nn.parallel.DistributedDataParallel(model, process_group=ranks.group)
    loss = parallel(mine.input, mine.target)
    loss.backward()
    same("loss", loss.detach(), one.detach())
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        same("gradient", parameter.grad, gradient)


def ranks_without_a_kept_token_hang_or_give_nan(ranks: Ranks):
    _, mine = _parts(ranks)
    mine.target.fill_(-100)
    mine.options |= {"reduction_group": ranks.group, "entropy_coef": 0.1}
    got = solve(all_losses, mine)
    assert got.values["loss"] == 0 and not any(g.any() for g in got.gradients.values())


def num_items_in_batch_counts_the_ranks_twice_or_not_at_all(ranks: Ranks):
    """The other way to the same mean: a sum, divided by the count of all ranks and times their number."""
    whole, mine = _parts(ranks)
    items = torch.tensor(int((mine.target != -100).sum()))
    dist.all_reduce(items, group=ranks.group)
    w = mine.linear_weight.clone().requires_grad_()
    (linear_cross_entropy(mine.input, w, mine.target, reduction="sum") / items * ranks.size).backward()
    same(
        "gradient",
        _averaged(w.grad, ranks),
        solve(
            lambda p: {
                "loss": linear_cross_entropy(p.input, p.linear_weight, p.target)
                / torch.randn((), generator=torch.Generator().manual_seed(5))
            },
            whole,
        ).gradients["linear_weight"],
    )


def group_is_ignored_where_it_has_no_meaning(ranks: Ranks):
    _, mine = _parts(ranks)
    call = (mine.input, mine.linear_weight, mine.target)
    message = refused(lambda: linear_cross_entropy(*call, reduction="none", reduction_group=ranks.group))
    assert message.startswith("reduction_group: has no meaning")
    rows = slice(4 * ranks.rank, 4 * ranks.rank + 4)
    call = (mine.input, mine.linear_weight[rows], mine.target)
    message = refused(lambda: linear_cross_entropy(*call, process_group=ranks.group, reduction_group=ranks.group))
    assert message.startswith("reduction_group: is the group that shares the vocabulary")
    refused(lambda: linear_cross_entropy(*call, reduction_group="world"), TypeError)


def benchmark_of_the_parallel_head_fails(ranks: Ranks):
    """benchmarks/tensor_parallel.py: its correctness check, and a row for each of its own schemes."""
    script = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "tensor_parallel.py"))
    world = script["World"](ranks.rank, ranks.size, torch.device("cpu"))
    with contextlib.redirect_stdout(io.StringIO()):
        assert script["check"](world, (20, 8, 70), torch.bfloat16)
        names = ["one", "tp", "sequence", "fsdp"]
        rows = script["timings"](world, (9, 8, 30), torch.bfloat16, names, repeat=1)
    assert [row.scheme for row in rows] == names and all(row.step_ms > 0 for row in rows)


def compiled_mean_is_wrong(ranks: Ranks):
    whole, mine = _parts(ranks)

    def call(x):
        return linear_cross_entropy(x * 1.0, mine.linear_weight, mine.target, reduction_group=ranks.group)

    x = mine.input.clone().requires_grad_()
    loss = torch.compile(call, backend="aot_eager")(x)
    loss.backward()
    same("loss", loss.detach(), plain_losses(whole)["loss"])
    eager = mine.input.clone().requires_grad_()
    call(eager).backward()
    same("gradient", x.grad, eager.grad)
