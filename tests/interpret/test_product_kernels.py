"""The kernels that make the products themselves, in the interpreter, which takes any dtype for half operands."""

import dataclasses

import pytest
import torch
from problems import TRANSFORM, all_statistics, check_losses, check_statistics, problem

from liger_entropy import ComputeOptions, engine, gradients, planner
from liger_entropy.backends import hopper
from liger_entropy.equations import FIELDS, TARGET_LOGIT, Transform
from liger_entropy.labels import Labels

# The interpreter computes with numpy, which warns of the log 0 and exp overflow that the kernels select away.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
COLUMNS = hopper.BLOCK_COLUMNS
NAMES = ("linear_bias", "weight", "token_weight", "temperature")
OPTIONS = {
    "defaults": ((), {}),
    "everything": (NAMES, dict(label_smoothing=0.1, softcap=3.0, logit_scale=1.3, lse_square_scale=0.1)),
}


@pytest.fixture(autouse=True)
def kernels_used(monkeypatch):
    """Choose them on the CPU too, and see that they ran."""
    launched = set()
    launch = hopper.launch
    monkeypatch.setattr(hopper, "launch", lambda kernel, *a: launched.add(kernel.__name__) or launch(kernel, *a))
    monkeypatch.setattr(planner, "choose_kernels", lambda backend, weight, dtype: "hopper")
    yield
    assert "product_statistics_kernel" in launched


def compute(**options):
    return ComputeOptions(backend="triton", **options)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("tokens, vocab", [(1, 1), (5, COLUMNS), (130, COLUMNS + 1), (3, 2 * COLUMNS - 100)])
def test_ragged_tile_is_wrong(tokens, vocab, option):
    """Rows and columns that do not fill a tile, one that they fill, and one column more."""
    names, options = OPTIONS[option]
    p = problem(tokens, 8, vocab, names=names, ignored=0, **options)
    check_losses(p, compute(cache_bytes=0))
    names = [name for name in names if name != "token_weight"]
    options = {name: value for name, value in options.items() if name in TRANSFORM}
    check_statistics(problem(tokens, 8, vocab, names=names, ignored=0, **options), compute(cache_bytes=0))


@pytest.mark.parametrize("cached", [0, 3])
@pytest.mark.parametrize("head", [0, 1])
def test_ragged_columns_in_a_launch_of_their_own_are_wrong(head, cached, monkeypatch):
    """As where the columns before them take many rounds."""
    monkeypatch.setattr(engine, "MASKED_ROUNDS", 1)
    monkeypatch.setattr(Labels, "are_waited_for", property(lambda labels: labels.drop))
    monkeypatch.setattr(planner, "head_start", lambda *_: head * COLUMNS)
    widths, fold = [], engine.Forward._fold
    monkeypatch.setattr(
        engine.Forward, "_fold", lambda self, chunk: widths.append(chunk.stop - chunk.start) or fold(self, chunk)
    )
    p = problem(5, 8, 3 * COLUMNS + 40, names=("linear_bias",), ignored=0, entropy_coef=0.1)
    p.target[:] = torch.tensor([0, COLUMNS, 3 * COLUMNS - 1, 3 * COLUMNS, 3 * COLUMNS + 39])
    check_losses(p, compute(cache_bytes=1 << 30 if cached else 0))
    first = [COLUMNS, 2 * COLUMNS] if head else [3 * COLUMNS]
    assert widths[: len(first) + 1] == [*first, 40]


@pytest.mark.parametrize("cached", [0, 1])
@pytest.mark.parametrize("vocab", [12 * COLUMNS, 13 * COLUMNS - 100])
def test_wide_chunk_overwrites_the_weight_gradient(vocab, cached, monkeypatch):
    """Its gradient lies in the rows of dw that are still to come."""
    monkeypatch.setattr(planner, "MiB", 1)
    widths, wide = [], gradients.Accumulation._wide
    monkeypatch.setattr(
        gradients.Accumulation, "_wide", lambda self, c: widths.append(c.stop - c.start) or wide(self, c)
    )
    check_losses(problem(7, 8, vocab, ignored=0, entropy_coef=0.1), compute(cache_bytes=cached * COLUMNS * 7 * 4))
    assert len(widths) > 1 and max(widths) > COLUMNS


@pytest.mark.parametrize("cache_bytes", [0, 1 << 30])
def test_gradient_that_fits_in_one_chunk_takes_two(cache_bytes, monkeypatch):
    vocab, bounds, run = 2 * COLUMNS + 188, [], gradients.Accumulation.run
    monkeypatch.setattr(
        gradients.Accumulation, "run", lambda self: bounds.append(self.cached + self.narrow) or run(self)
    )
    check_losses(problem(4, 8, vocab, ignored=0), compute(chunk_bytes=1 << 30, cache_bytes=cache_bytes))
    assert bounds and all(b == [(0, vocab)] for b in bounds)


@pytest.mark.parametrize("depth", [8, 64, 72])
def test_depth_of_the_product_is_cut(depth):
    check_losses(problem(6, depth, 300), compute(cache_bytes=0))


@pytest.mark.parametrize("skip_ignored", [True, False])
@pytest.mark.parametrize("cached", [0, 1, 2, 3])
@pytest.mark.parametrize("option", OPTIONS)
def test_cache_or_chunks_are_wrong(option, cached, skip_ignored):
    """None, one or two blocks, or all of the logits kept for the backward, whose chunks are one block wide."""
    names, options = OPTIONS[option]
    p = problem(5, 8, 2 * COLUMNS + 100, names=names, **options)
    budget = 1 << 30 if cached == 3 else cached * 5 * 4 * COLUMNS
    check_losses(p, compute(cache_bytes=budget, chunk_bytes=1, skip_ignored=skip_ignored), k=4.0)


def test_masked_class_or_nan_spreads():
    """NUM-04, NUM-05: -inf in the bias is a class of probability 0; a NaN row poisons no other."""
    p = problem(4, 8, COLUMNS + 50, names=("linear_bias",), ignored=0)
    p.options["linear_bias"][:COLUMNS] = -torch.inf
    p.target[:] = COLUMNS + 7
    clean = all_statistics(p, compute(cache_bytes=0))
    assert all(v.isfinite().all() for name, v in clean.items() if name != "smooth_logprob")
    p.input[2] = torch.nan
    for name, value in all_statistics(p, compute(cache_bytes=0)).items():
        others = [0, 1, 3]
        assert torch.equal(value[others], clean[name][others]), name
        assert name == "prediction" or value[2].isnan(), name


@pytest.mark.parametrize("rows", [100, COLUMNS, COLUMNS + 44])
def test_label_of_the_next_shard_has_a_logit_here(rows):
    """Two shards of the vocabulary, the first ending within a tile; labels on both sides of the border."""
    p = problem(6, 8, rows + 200, ignored=0)
    p.target[:] = torch.tensor([0, rows - 1, rows, rows + 5, rows + 60, rows + 199])
    logits = []
    for start, stop in ((0, rows), (rows, rows + 200)):
        partials = torch.zeros(-(-(stop - start) // COLUMNS), FIELDS, 6)
        statistics = hopper.Statistics(p.target, Transform(), (True, True, True), overwrite=True)
        statistics(hopper.Operands(p.input, p.linear_weight[start:stop]), None, None, start, partials, None)
        logits.append(partials[:, TARGET_LOGIT].sum(0))
    exact = (p.input.double() * p.linear_weight[p.target].double()).sum(-1)
    assert all(z.isfinite().all() for z in logits)
    assert torch.allclose(sum(logits).double(), exact, atol=1e-5)
    assert (logits[0][2:] == 0).all() and (logits[1][:2] == 0).all()


def test_operands_that_tma_cannot_read_are_taken_in_place():
    """A weight whose first element is not at a multiple of 16 bytes, an input whose rows are apart."""
    p = problem(4, 8, 300, ignored=0)
    expected = all_statistics(p, compute(cache_bytes=0))
    flat = torch.cat([torch.zeros(1), p.linear_weight.flatten()])
    apart = torch.zeros(4, 11)
    apart[:, 1:9] = p.input
    moved = dataclasses.replace(p, linear_weight=flat[1:].view(300, 8), input=apart[:, 1:9])
    assert moved.linear_weight.data_ptr() % 16 and moved.input.stride(0) == 11
    for name, value in all_statistics(moved, compute(cache_bytes=0)).items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("cached", [0, 1, 3])
@pytest.mark.parametrize("ignored", [0, 0.4])
def test_forward_that_was_started_gives_something_else(ignored, cached, monkeypatch):
    """Its first block of columns, and the logits kept of it, are launched alone."""
    p = problem(6, 8, 3 * COLUMNS - 50, ignored=ignored, entropy_coef=0.1)
    monkeypatch.setattr(Labels, "are_waited_for", property(lambda labels: labels.drop))
    monkeypatch.setattr(planner, "head_start", lambda *_: COLUMNS)
    check_losses(p, compute(cache_bytes=cached * COLUMNS * 6 * 4))
