"""The weight's rows spread over a process group."""

from __future__ import annotations

import math
from unittest import mock

import torch
import torch.distributed as dist
from problems import all_losses, all_statistics, given, largest, plain_losses, plain_statistics, problem, solve
from ranks import Ranks, on
from sharding import EVERYTHING, SPLITS, check_shard, refused, rows_of, same, same_everywhere, shard, small

from liger_entropy import (
    ComputeOptions,
    LigerFusedLinearCrossEntropyLoss,
    cross_entropy,
    linear_cross_entropy,
    linear_token_statistics,
)
from liger_entropy.integrations import verl


@on(2, 3)
def loss_or_a_gradient_is_wrong_with_every_option(ranks: Ranks):
    for split in SPLITS[ranks.size]:
        check_shard(small(**EVERYTHING), rows_of(split, ranks.rank), ranks.group)


def loss_or_a_gradient_is_wrong_without_options(ranks: Ranks):
    check_shard(small(), rows_of((4, 4, 2), ranks.rank), ranks.group)


@on(2, 3)
def statistic_is_wrong(ranks: Ranks):
    p = small(names=("linear_bias", "weight"), softcap=3.0)
    for split in SPLITS[ranks.size]:
        check_shard(p, rows_of(split, ranks.rank), ranks.group, all_statistics, plain_statistics)


def gradient_is_wrong_when_only_one_statistic_is_used(ranks: Ranks):
    p, rows = small(), rows_of((4, 4, 2), ranks.rank)
    for field in ("logprob", "entropy", "lse"):

        def plain(p, field=field):
            return {field: plain_statistics(p)[field]}

        def ours(p, compute, field=field):
            return {field: all_statistics(p, compute)[field]}

        check_shard(p, rows, ranks.group, ours, plain)


def rank_that_owns_no_label_takes_no_part(ranks: Ranks):
    p = small(**EVERYTHING)
    p.target = torch.tensor([4, 5, -100, 6, 7])
    check_shard(p, rows_of((4, 4, 2), ranks.rank), ranks.group)


def call_hangs_or_gives_nan_when_every_label_is_ignored(ranks: Ranks):
    p = small(**EVERYTHING)
    for tokens in (5, 0):
        p.target = torch.full((tokens,), -100)
        p.input, p.options["temperature"] = p.input[:tokens], p.options["temperature"][:tokens]
        p.options["token_weight"] = p.options["token_weight"][:tokens]
        got = solve(all_losses, shard(p, rows_of((4, 4, 2), ranks.rank), ranks.group))
        assert got.values["loss"] == 0 and got.values["entropy_loss"] == 0
        for name, gradient in got.gradients.items():
            assert gradient is not None and not gradient.any(), f"gradient of {name}: {gradient}"


def blocks_of_a_wide_shard_lose_a_label_or_the_cache(ranks: Ranks):
    """Shards of more than one chunk; no rank owns both labels; logits kept for some, all or none of the chunks."""
    p = problem(4, 5, 5000, torch.float64, names=("linear_bias",), label_smoothing=0.1, entropy_coef=0.1)
    p.target = torch.tensor([2099, 2100, 4999, 2100])
    for cache in (0, 1100 * 4 * 8, 10**9):
        options = ComputeOptions(cache_bytes=cache, chunk_bytes=1)
        check_shard(p, rows_of((2100, 2899, 1), ranks.rank), ranks.group, compute=options)


@on(2, 3)
def prediction_is_not_the_first_of_equals(ranks: Ranks):
    split = {2: (4, 6), 3: (4, 4, 2)}[ranks.size]
    x, w = torch.ones(1, 2, dtype=torch.float64), torch.zeros(10, 2, dtype=torch.float64)
    for winners in ([9, 3], [2, 3, 8], [5, 4], range(10), [9]):
        w.zero_()[list(winners)] = 1.0
        rows = rows_of(split, ranks.rank)
        s = linear_token_statistics(x, w[rows], torch.tensor([0]), process_group=ranks.group)
        assert s.prediction.item() == min(winners)


@on(2, 3)
def padding_takes_part(ranks: Ranks):
    """Rows beyond vocab_size, whatever they hold: no mass, gradient 0; also a rank with nothing but padding."""
    for split in {2: [(6, 6), (9, 7)], 3: [(4, 4, 4), (5, 5, 3)]}[ranks.size]:
        p, rows = small(**EVERYTHING), rows_of(split, ranks.rank)
        padding = sum(split) - 10
        exact = solve(plain_losses, p)
        for junk in (0.0, math.nan, math.inf, -1e30):
            whole = small(**EVERYTHING)
            filler = torch.full((padding, 6), junk, dtype=torch.float64)
            whole.linear_weight = torch.cat([p.linear_weight, filler])
            whole.options["linear_bias"] = torch.cat([p.options["linear_bias"], filler[:, 0]])
            got = solve(all_losses, shard(whole, rows, ranks.group, vocab_size=10))
            same("loss", got.values["loss"], exact.values["loss"])
            same("gradient of input", got.gradients["input"], exact.gradients["input"])
            for name in ("linear_weight", "linear_bias"):
                expected = torch.cat(
                    [exact.gradients[name], torch.zeros_like(filler if name == "linear_weight" else filler[:, 0])]
                )
                same(f"gradient of {name}", got.gradients[name], expected[rows])


def padding_by_a_bias_of_minus_infinity_gives_nan(ranks: Ranks):
    p = small(names=("linear_bias",))
    exact = solve(plain_losses, p)
    p.linear_weight = torch.cat([p.linear_weight, torch.zeros(2, 6, dtype=torch.float64)])
    p.options["linear_bias"] = torch.cat([p.options["linear_bias"], torch.full((2,), -math.inf, dtype=torch.float64)])
    got = solve(all_losses, shard(p, rows_of((5, 5, 2), ranks.rank), ranks.group))  # the last rank holds only these two
    for name in ("loss", "entropy_loss"):
        same(name, got.values[name], exact.values[name])
    same("gradient of input", got.gradients["input"], exact.gradients["input"])


def class_weights_are_cut_wrongly(ranks: Ranks):
    """All of them, one per row of the shard, and with padding."""
    for split, vocab_size in (((4, 4, 2), None), ((0, 10, 0), None), ((4, 4, 4), 10)):
        p, rows = small(**EVERYTHING), rows_of(split, ranks.rank)
        exact, c = solve(plain_losses, p), p.options["weight"]
        p.linear_weight = torch.cat([p.linear_weight, torch.zeros(sum(split) - 10, 6, dtype=torch.float64)])
        p.options["linear_bias"] = torch.nn.functional.pad(p.options["linear_bias"], (0, sum(split) - 10))
        for given_weight in (c, torch.nn.functional.pad(c, (0, sum(split) - 10), value=math.nan)[rows]):
            got = solve(all_losses, shard(p, rows, ranks.group, weight=given_weight, vocab_size=vocab_size))
            same("loss", got.values["loss"], exact.values["loss"])
            same("gradient of input", got.gradients["input"], exact.gradients["input"])
    wrong = torch.ones(7 if ranks.rank == 1 else 4)
    call = shard(small(), rows_of((4, 4, 2), ranks.rank), ranks.group, weight=wrong)
    assert "class_weight" in refused(lambda: all_losses(call))


@on(2, 3)
def label_outside_the_vocabulary_hangs_or_passes(ranks: Ranks):
    for label in (10, -7, 11):
        p = small()
        p.target = torch.tensor([0, label, -100, 5, 8])
        rows = rows_of(SPLITS[ranks.size][0], ranks.rank)
        message = refused(lambda p=p, rows=rows: all_losses(shard(p, rows, ranks.group)))
        assert f"label {label} at flat position 1" in message and "[0, 10)" in message
        unchecked = ComputeOptions(check_labels=False)
        s = linear_token_statistics(
            p.input, p.linear_weight[rows], p.target, process_group=ranks.group, options=unchecked
        )
        assert s.logprob[1].isnan() and s.logprob[[0, 2, 3, 4]].isfinite().all()


@on(2, 3)
def whole_weight_on_every_rank_is_counted_several_times(ranks: Ranks):
    p = small()
    message = refused(lambda: all_losses(shard(p, slice(0, 10), ranks.group, vocab_size=10)))
    assert "several of them all of" in message


def ranks_that_disagree_hang(ranks: Ranks):
    """Every rank gets an error that names the argument."""
    first, rows = ranks.rank == 0, rows_of((4, 4, 2), ranks.rank)
    p = small()
    cases = {
        "target": dict(target=torch.tensor([0, 9, -100, 5, 8 - first])),
        "vocab_size": dict(vocab_size=10 - first),
        "process_group": dict(softcap=2.0 + first),
        "hidden sizes": dict(input=p.input[:, : 6 - first], linear_weight=p.linear_weight[rows, : 6 - first]),
        "same tokens": dict(input=p.input[: 5 - first], target=p.target[: 5 - first]),
        "requires_grad": dict(input=p.input.clone().requires_grad_(first)),
        "products' dtype": dict(input=p.input.float(), linear_weight=p.linear_weight[rows].float()) if first else {},
        "outputs wanted": dict(entropy_coef=0.1 * first),
        "skip_ignored": dict(options=ComputeOptions(skip_ignored=first)),
        "check_labels": dict(options=ComputeOptions(check_labels=first)),
        "fewer than": dict(vocab_size=11),
    }
    for word, change in cases.items():
        arguments = dict(input=p.input, linear_weight=p.linear_weight[rows], target=p.target) | change
        message = refused(lambda arguments=arguments: linear_cross_entropy(**arguments, process_group=ranks.group))
        assert word in message or (word == "fewer than" and "declared 11" in message), f"{word}: {message}"


def ranks_take_different_temperatures(ranks: Ranks):
    """Also where a multiple of the difference wraps to 0: every fourth token, powers of 2, signs, two tokens."""
    rows, p = rows_of((4, 4, 2), ranks.rank), small()
    for places, value in (((0,), 2.0), ((1,), -1.0), ((3,), math.inf), ((0, 2), -1.0), ((4,), 0.5)):
        temperature = torch.ones(5)
        if ranks.rank == 0:
            temperature[list(places)] = value
        call = dict(input=p.input, linear_weight=p.linear_weight[rows], target=p.target)
        call |= dict(temperature=temperature)
        message = refused(lambda call=call: linear_cross_entropy(**call, process_group=ranks.group))
        assert "temperature" in message and "checksums" in message, message


def ranks_wait_for_one_that_raised(ranks: Ranks):
    """Its own error there, and one that points at it elsewhere."""
    first, rows = ranks.rank == 0, rows_of((4, 4, 2), ranks.rank)
    p = small()
    for change in (
        dict(linear_bias=torch.ones(3 if first else rows.stop - rows.start)),
        dict(token_weight=torch.ones(4 if first else 5)),
        dict(temperature=-1.0 if first else 1.0),
        dict(options=ComputeOptions(backend="triton" if first else "torch")),
    ):
        kind = RuntimeError if not first or "options" in change else ValueError
        message = refused(
            lambda change=change: linear_cross_entropy(
                p.input, p.linear_weight[rows], p.target, process_group=ranks.group, **change
            ),
            kind,
        )
        assert first or "rank 0 of the group refused its arguments" in message


def ranks_without_a_group_communicate(ranks: Ranks):
    """Different data on every rank, and every collective forbidden."""
    p = problem(4 + ranks.rank, 6, 10, torch.float64, seed=ranks.rank, **EVERYTHING)
    exact = solve(plain_losses, p)
    names = [name for name in ("all_gather_into_tensor", "all_gather_single", "all_reduce") if hasattr(dist, name)]
    with mock.patch.multiple(dist, **{name: mock.Mock(side_effect=AssertionError(name)) for name in names}):
        got = solve(all_losses, p)
    same("loss", got.values["loss"], exact.values["loss"])
    same("gradient of weight", got.gradients["linear_weight"], exact.gradients["linear_weight"])


def collectives_grow_with_the_vocabulary(ranks: Ranks):
    """One small and one packed all-gather in the forward, one all-reduce in the backward, whatever the chunks."""
    from liger_entropy import distributed

    p = problem(3, 4, 9000, torch.float64, entropy_coef=0.1)
    rows = rows_of((3000, 3000, 3000), ranks.rank)
    gather, reduce = mock.Mock(side_effect=distributed._all_gather), mock.Mock(side_effect=dist.all_reduce)
    with mock.patch.object(distributed, "_all_gather", gather), mock.patch.object(dist, "all_reduce", reduce):
        solve(lambda p: all_losses(p, ComputeOptions(chunk_bytes=1)), shard(p, rows, ranks.group))
    assert (gather.call_count, reduce.call_count) == (2, 1)


def frozen_parts_or_a_second_backward_are_wrong(ranks: Ranks):
    p, rows = small(), rows_of((4, 4, 2), ranks.rank)
    exact = solve(lambda p: {"loss": plain_losses(p)["loss"]}, p)
    scale = torch.randn((), generator=torch.Generator().manual_seed(5)).double()  # solve's upstream gradient
    for frozen in ("input", "linear_weight", None):
        x, w = p.input.clone().requires_grad_(frozen != "input"), p.linear_weight[rows].clone()
        w.requires_grad_(frozen != "linear_weight")
        loss = linear_cross_entropy(x, w, p.target, process_group=ranks.group)
        for _ in range(2):
            x.grad = w.grad = None
            loss.backward(scale, retain_graph=True)
            if frozen != "input":
                same("gradient of input", x.grad, exact.gradients["input"])
            if frozen != "linear_weight":
                same("gradient of weight", w.grad, exact.gradients["linear_weight"][rows])


def half_precision_is_less_exact_than_on_one_rank(ranks: Ranks):
    p = problem((3, 20), 32, 301, torch.bfloat16, names=("linear_bias",), entropy_coef=0.1, label_smoothing=0.1)
    rows = rows_of((101, 150, 50), ranks.rank)
    exact, one = solve(plain_losses, p, torch.float64), solve(all_losses, p)
    got = solve(all_losses, shard(p, rows, ranks.group))
    for name in ("loss", "entropy_loss"):
        assert (
            largest(got.values[name] - exact.values[name]) <= 2 * largest(one.values[name] - exact.values[name]) + 1e-5
        )
    for name, cut in (("input", slice(None)), ("linear_weight", rows)):
        error = largest(got.gradients[name] - exact.gradients[name][cut])
        assert error <= 1.05 * largest(one.gradients[name] - exact.gradients[name]), f"{name}: {error}"
    same_everywhere("gradient of input", got.gradients["input"], ranks.group)


@on(2, 3)
def sharded_logits_are_wrong(ranks: Ranks):
    p = given(small(label_smoothing=0.1, entropy_coef=0.2, lse_square_scale=0.01, names=("weight",)))
    exact = solve(plain_losses, p)
    for split in SPLITS[ranks.size]:
        rows = rows_of(split, ranks.rank)
        z = p.logits[:, rows].clone().requires_grad_()
        loss = cross_entropy(z, p.target, process_group=ranks.group, **p.options)
        loss.backward()
        whole = p.leaves()
        plain_losses(whole)["loss"].backward()
        same("loss", loss.detach(), exact.values["loss"])
        same("gradient of logits", z.grad, whole.logits.grad[:, rows])


def classes_masked_on_a_whole_rank_give_nan(ranks: Ranks):
    p = small(names=("linear_bias",), entropy_coef=0.1)
    p.options["linear_bias"][4:8] = -math.inf
    p.target = torch.tensor([0, 9, -100, 3, 8])
    check_shard(p, rows_of((4, 4, 2), ranks.rank), ranks.group)


def module_or_functional_drops_the_group(ranks: Ranks):
    p, rows = small(), rows_of((4, 4, 4), ranks.rank)
    w = torch.nn.functional.pad(p.linear_weight, (0, 0, 0, 2), value=math.nan)[rows]
    module = LigerFusedLinearCrossEntropyLoss(process_group=ranks.group, vocab_size=10)
    same("loss", module(w, p.input, p.target), plain_losses(p)["loss"])


def verl_s_function_counts_the_gradient_of_hidden_twice(ranks: Ranks):
    """Its callers add up the ranks' gradients of hidden, as verl's own function leaves that to them."""
    p, rows = small(), rows_of((4, 4, 2), ranks.rank)
    x, w = p.input.clone().requires_grad_(), p.linear_weight[rows].clone().requires_grad_()
    logprobs, entropy = verl.linear_cross_entropy(x, w, p.target, 0.7, "none", ranks.group)
    (logprobs.sum() + 0.3 * entropy.sum()).backward()
    dist.all_reduce(x.grad, group=ranks.group)
    p.options["temperature"] = 0.7
    leaf = p.leaves()
    exact = plain_statistics(leaf)
    (exact["logprob"].sum() + 0.3 * exact["entropy"].sum()).backward()
    same("logprobs", logprobs, exact["logprob"])
    same("entropy", entropy, exact["entropy"])
    same("gradient of hidden", x.grad, leaf.input.grad)
    same("gradient of weight", w.grad, leaf.linear_weight.grad[rows])


def compiled_call_is_wrong(ranks: Ranks):
    """The graph breaks where the shards' sizes are read; a whole graph is refused with that reason."""
    p, rows = small(entropy_coef=0.3), rows_of((4, 4, 2), ranks.rank)
    exact = plain_losses(p)["loss"]
    x, w = p.input.clone().requires_grad_(), p.linear_weight[rows].clone()

    def call(x):
        return linear_cross_entropy(x * 1.0, w, p.target, process_group=ranks.group, entropy_coef=0.3)

    loss = torch.compile(call, backend="aot_eager")(x)
    loss.backward()
    leaf = p.leaves()
    plain_losses(leaf)["loss"].backward()
    same("loss", loss.detach(), exact)
    same("gradient of input", x.grad, leaf.input.grad)
    torch.compiler.reset()
    message = refused(lambda: torch.compile(call, backend="aot_eager", fullgraph=True)(x), RuntimeError)
    assert "the sizes of the vocabulary's shards are read from the other ranks" in message
