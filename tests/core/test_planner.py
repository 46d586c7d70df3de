"""Chunk widths, cache sizes and the choice of backend, as pure functions. Cases MEM-07, CMP-05."""

import itertools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from liger_entropy import backends, planner
from liger_entropy.notices import warn_once

BLOCKS = {"torch": 1024, "triton": 1024, "hopper": 256}
ROWS = [0, 1, 2, 1000, 2047, 2048, 8192, 10**6]
VOCABULARIES = [1, 2, 1023, 1024, 1025, 2048, 2049, 32001, 128256, 10**6]


@pytest.fixture(params=BLOCKS)
def backend(request):
    if request.param != "torch":
        pytest.importorskip("triton")
    return request.param


@pytest.mark.parametrize("chunk_bytes", ["auto", 1, 4096, 10**6, 10**9, 2**62])
def test_chunk_is_empty_or_wider_than_the_vocabulary(chunk_bytes, backend):
    """MEM-07: 1 <= chunk <= V, whole blocks unless all, at every size; the forward's too."""
    for rows, vocab in itertools.product(ROWS, VOCABULARIES):
        widths = planner.chunk_widths(rows, vocab, backend, chunk_bytes)
        for columns in (widths.logits, widths.gradient, widths.wide or 1 * vocab):
            assert 1 <= columns <= vocab
            assert columns == vocab or columns % BLOCKS[backend] == 0


@pytest.mark.parametrize("budget", [0, 1, 10**6, 2**62])
def test_cache_is_larger_than_its_budget_or_cuts_a_block(budget, backend):
    """MEM-07: a budget of 0 keeps nothing."""
    block = BLOCKS[backend]
    for rows, vocab in itertools.product(ROWS, VOCABULARIES):
        columns = planner.cache_columns(rows, vocab, block, budget, 2)
        assert 0 <= columns <= vocab
        assert columns == vocab or columns % block == 0
        assert rows == 0 or columns * rows * 2 <= budget


def test_chunk_bytes_is_exceeded(backend):
    """A chunk takes what was allowed, or one block where that is not enough. Kernels that make the products keep half
    gradients in it, and no logits unless they need copies of the weight."""
    for rows, vocab, limit in itertools.product((1, 2048), (32001, 10**6), (10**6, 10**8)):
        widths = planner.chunk_widths(rows, vocab, backend, limit, copies=True)
        for columns in (widths.logits, widths.gradient):
            bytes_used = columns * rows * (2 if backend == "hopper" else 4)
            assert bytes_used <= limit or columns == min(BLOCKS[backend], vocab)


def test_automatic_chunk_is_a_large_part_of_the_logits(backend):
    """At the sizes that matter a chunk is under 5 % of the logits."""
    for rows, vocab in ((2048, 32000), (8192, 128256), (16384, 152064)):
        widths = planner.chunk_widths(rows, vocab, backend, "auto", copies=True)
        assert widths.gradient <= 0.033 * vocab
        assert widths.logits <= 0.065 * vocab


def test_automatic_cache_takes_memory_on_the_cpu():
    assert planner.free_for_cache("auto", torch.device("cpu")) == 0
    assert planner.cache_budget("auto", 0, 0) == 0
    assert planner.cache_budget(123, 0, 10**9) == 123
    assert planner.cache_budget("auto", 1000, 200) == 200


def test_cpu_chooses_triton_or_double_does():
    """CMP-05, CMP-06"""
    cpu = torch.device("cpu")
    assert planner.choose_backend("torch", cpu, torch.float32) == "torch"
    assert planner.choose_backend("auto", cpu, torch.float32) == "torch"
    assert planner.choose_backend("auto", torch.device("cuda"), torch.float64) == "torch"


@pytest.mark.parametrize("dtype, reason", [(torch.float64, "float64"), (torch.float32, "the input is on cpu")], ids=str)
def test_explicit_backend_falls_back_silently(dtype, reason, monkeypatch):
    """The contract's point 10"""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(RuntimeError, match=reason):
        planner.choose_backend("triton", torch.device("cpu"), dtype)


def test_missing_triton_is_not_reported(monkeypatch):
    """The contract's point 10: on CUDA "auto" falls back once with the reason, an explicit choice raises it."""
    monkeypatch.setattr(planner, "triton_missing", lambda: "the package triton is not installed")
    warn_once.cache_clear()
    with pytest.warns(UserWarning, match="because the package triton is not installed"):
        assert planner.choose_backend("auto", torch.device("cuda"), torch.bfloat16) == "torch"
    with pytest.raises(RuntimeError, match="not installed"):
        planner.choose_backend("triton", torch.device("cuda"), torch.bfloat16)


def test_launch_has_too_many_threads():
    """CMP-05: at most 1024 threads a program, also with 64 lanes to a warp."""
    pytest.importorskip("triton")
    assert backends.get("triton").WARPS * 64 <= 1024


def test_cache_is_kept_where_saved_tensors_are_recomputed(monkeypatch):
    """What is free may differ when an activation checkpoint runs the forward again, and then the saved shapes would."""
    monkeypatch.setattr(planner, "free_memory", lambda device: 7)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    found = []

    def head(x):
        found.append(planner.free_for_cache("auto", torch.device("cuda")))
        return x.sin()

    x = torch.ones(2, requires_grad=True)
    checkpoint(head, x, use_reentrant=False).sum().backward()
    assert found == [0, 0]
    head(x)
    assert found[2] == 7


@pytest.mark.parametrize("count", [1, 2, 132])
def test_chunk_that_ends_with_a_round_of_tiles_is_wider_or_takes_more_rounds(count, monkeypatch):
    """132 multiprocessors as on an H200."""
    pytest.importorskip("triton")
    hopper = backends.get("hopper")
    monkeypatch.setattr(hopper, "_multiprocessors", lambda device: count)
    for rows, columns in itertools.product([*ROWS, 4096, 16384], [*VOCABULARIES, 4748, 50645]):
        found = hopper.columns_of_whole_rounds(rows, columns, torch.device("cpu"))
        assert found % 256 == 0 and found <= columns and (found > 0) == (columns >= 256)
        tiles, row_tiles = columns // 256, -(-rows // 128)
        rounds, fewer = -(-tiles * row_tiles // count), -(-found // 256 * row_tiles // count)
        assert found == tiles * 256 or (fewer < rounds and fewer * tiles < rounds * found // 256)


def test_last_round_of_tiles_is_nearly_empty_or_cut_where_it_is_nearly_full(monkeypatch):
    pytest.importorskip("triton")
    hopper = backends.get("hopper")
    monkeypatch.setattr(hopper, "_multiprocessors", lambda device: 132)
    cases = {(4096, 197): 193, (4096, 37): 37, (4096, 8): 8, (6144, 8): 8, (9216, 3): 3, (20000, 3): 3, (8192, 66): 66}
    for (rows, tiles), kept in cases.items():
        assert hopper.columns_of_whole_rounds(rows, tiles * 256, torch.device("cpu")) == kept * 256, (rows, tiles)


def test_copy_of_the_weight_is_as_large_as_the_weight():
    """Operands in another dtype are copied chunk by chunk, also where the kernels make the products."""
    pytest.importorskip("triton")
    for rows in (512, 8192):
        widths = planner.chunk_widths(rows, 128256, "hopper", "auto", copies=True)
        assert max(widths.logits, widths.wide) <= 4 * widths.gradient
        assert planner.chunk_widths(rows, 128256, "hopper", "auto").wide == 128256
