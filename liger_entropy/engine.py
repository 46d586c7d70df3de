"""A call as the loops see it, and the forward loop; the backward's is in gradients.py.

For each chunk of columns the forward makes ``z = x w_c^T`` and folds it into per-row partials; the backward makes it
again (or reads the cached copy), turns it into its own gradient ``g``, and adds ``dx += g w_c``, ``dw_c = g^T x``.
A backend that makes the products in its kernels takes both operands in place of ``z``, which then is never written.
``weight`` may be absent: then ``x`` holds given logits and dx is their gradient.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import backends, distributed
from .equations import FIELDS, ROW_MAX, Transform, merge
from .notices import warn_once
from .products import Products, aligned, empty_aligned

# Rounds of tiles in which a mask costs more than a launch of its own, which takes about one round. A step of T=4096,
# D=2048, V=151936 (benchmarks/gpu_limits.py, no cache, H200, torch 2.11, triton 3.6, 2026-12-01) took 15.50 ms in place
# of 15.74; its forward has 144 rounds of 26 us, so that 16 pay for the launch, and as many for the host's time.
MASKED_ROUNDS = 32


class Tensors(NamedTuple):
    """The tensor arguments of a call. T tokens, D hidden size, V rows of the weight (classes of given logits)."""

    x: Tensor  # [T, D], or logits [T, V]
    weight: Tensor | None  # [V, D]
    target: Tensor  # [T] int64, coded: an index into the whole vocabulary, IGNORED or INVALID
    bias: Tensor | None  # [V]
    class_weight: Tensor | None  # [V]
    temperature: Tensor | None  # [T]
    order: Tensor | None  # [K] indices of rows, the kept ones first; None: every row in its place
    count: Tensor | None  # [] int64 on the CPU, how many of `order` are kept


class Sizes(NamedTuple):
    vocab_start: int  # global index of the weight's first row
    vocab_size: int  # global; rows of the weight beyond it are padding
    logits_columns: int  # of a chunk of logits
    gradient_columns: int  # of a chunk in the backward's products, where it takes memory of its own
    wide_columns: int  # the most, where the room costs nothing; 0: not to be used
    cache_columns: int  # leading columns whose logits are kept for the backward: whole chunks of logits, or all


class Settings(NamedTuple):
    """Everything of a call that is not a tensor, grouped as in the ops' schemas."""

    sizes: Sizes
    scales: tuple[float, float, float]  # logit_scale, softcap (0: none), 1 / temperature
    dtype: torch.dtype  # of the products' operands
    backend: str
    wanted: tuple[bool, bool, bool]  # which of entropy, smooth_logprob, prediction
    group: str  # name of the process group over which the vocabulary is sharded; "": none


class Upstream(NamedTuple):
    """Gradients [T] of the four differentiable statistics, None where none arrives."""

    logprob: Tensor | None
    entropy: Tensor | None
    lse: Tensor | None
    smooth: Tensor | None


class Kept(NamedTuple):
    """What the forward keeps. K = len(order), or T."""

    residuals: Tensor  # [4, K], see equations.finalize
    cache: Tensor  # [K, cache_columns] z - block maximum
    block_max: Tensor  # [blocks of the cache, K]


class Chunk(NamedTuple):
    """Consecutive classes, C of them, and the parameters' views for them."""

    start: int
    stop: int
    weight: Tensor | None  # [C, D]
    bias: Tensor | None  # [C]
    class_weight: Tensor | None  # [C]


class Problem:
    """The rows that take part in a call, and the chunks of the vocabulary they meet."""

    def __init__(self, tensors: Tensors, settings: Settings):
        self.tensors, self.settings, self.sizes = tensors, settings, settings.sizes
        self.index = None  # [R] tokens of the rows, None: all, and then `order` is not filled
        if tensors.order is not None and tensors.count is not None and int(tensors.count) < tensors.target.shape[0]:
            self.index = tensors.order[: int(tensors.count)]
        self.products = Products(settings.dtype, tensors.x.device)
        self.backend: ModuleType = backends.get(settings.backend)
        given = tensors.weight is None
        self.block_columns = self.backend.GIVEN_COLUMNS if given else self.backend.BLOCK_COLUMNS
        self.makes_products = self.backend.MAKES_PRODUCTS
        x = self.pick(tensors.x)
        if self.makes_products:
            x = x.contiguous()
        self.x = x if given else self.products.operand(x)  # [R, D], or logits [R, V]
        self.target = self.pick(tensors.target)  # [R]
        self.transform = self._transform()
        self.columns = self._columns()

    def pick(self, values: Tensor) -> Tensor:
        return values if self.index is None else values.index_select(0, self.index)

    def _transform(self) -> Transform:
        temperature = self.tensors.temperature
        if temperature is not None:
            temperature = self.pick(temperature).to(self.products.accumulator)[:, None]
        return Transform(*self.settings.scales, temperature)

    def _columns(self) -> int:
        """Classes that this call's weight (or logits) has: all its rows but the padding; 0 without tokens."""
        weight, s = self.tensors.weight, self.sizes
        size = self.x.shape[1] if weight is None else weight.shape[0]
        return max(0, min(size, s.vocab_size - s.vocab_start)) if self.x.shape[0] else 0

    def blocks(self, columns: int) -> int:
        return -(-columns // self.block_columns)

    def chunks(self, bounds: list[tuple[int, int]]) -> Iterator[Chunk]:
        """The bounds with the parameters' views, cut while the device works on the chunk before."""
        t, accumulator = self.tensors, self.products.accumulator
        bias = None if t.bias is None else t.bias.to(accumulator)
        class_weight = None if t.class_weight is None else t.class_weight.to(accumulator)
        for start, stop in bounds:
            yield Chunk(start, stop, *(part(v, start, stop) for v in (t.weight, bias, class_weight)))

    def operand(self, chunk: Chunk) -> Tensor:
        assert chunk.weight is not None
        return self.products.operand(chunk.weight)

    def logits(self, chunk: Chunk, out: Tensor | None) -> Any:
        """Products of the chunk into out [R, C], or its operands for a kernel that makes them."""
        if self.makes_products:
            return self.backend.Operands(self.x, self.operand(chunk))
        assert out is not None
        return self.products.logits(self.x, self.operand(chunk), out)


def part(tensor: Any, start: int, stop: int, dim: int = 0) -> Any:
    """A range of an optional tensor; all of it as it is, which saves the host a view."""
    if tensor is None or (start == 0 and stop == tensor.shape[dim]):
        return tensor
    return tensor.narrow(dim, start, stop - start)


class Buffer:
    """Room that every chunk uses in turn, as [R, C]."""

    def __init__(self, like: Tensor, bounds: list[tuple[int, int]], dtype: torch.dtype):
        self.rows = like.shape[0]
        widest = max((stop - start for start, stop in bounds), default=0)
        self.flat = like.new_empty(self.rows * aligned(widest), dtype=dtype)

    def view(self, columns: int) -> Tensor:
        return self.flat.as_strided((self.rows, columns), (aligned(columns), 1))


def steps(start: int, stop: int, step: int) -> list[tuple[int, int]]:
    return [(c, min(c + step, stop)) for c in range(start, stop, max(step, 1))]


def _padded(values: Tensor, size: int) -> Tensor:
    """Grown along its last dimension: rows beyond the kept ones exist only when the count is unknown outside."""
    return values if values.shape[-1] == size else torch.nn.functional.pad(values, (0, size - values.shape[-1]))


class Forward:
    """The forward loop. Its first `head` columns are launched at once, the others at the latest when it is finished."""

    def __init__(self, tensors: Tensors, settings: Settings, head: int = 0):
        self.problem = p = Problem(tensors, settings)
        self.size = tensors.target.shape[0] if tensors.order is None else tensors.order.shape[0]
        self.cache = _cache(p, self.size)
        self.cached = min(self.cache.shape[1], p.columns)
        # Ranks merge all fields; alone, those that are not wanted are never read.
        make = p.x.new_zeros if settings.group else p.x.new_empty
        self.partials = make(p.blocks(p.columns), FIELDS, p.x.shape[0], dtype=p.products.accumulator)
        self.given = tensors.weight is None
        self.statistics = p.backend.Statistics(p.target, p.transform, settings.wanted, overwrite=not self.given)
        bounds = self._bounds(head)
        self.buffer = None if self.given or p.makes_products else Buffer(p.x, bounds, p.products.accumulator)
        self.chunks = p.chunks(bounds)
        started = 0
        while started < min(head, p.columns):
            started = self._fold(next(self.chunks))

    def _bounds(self, head: int) -> list[tuple[int, int]]:
        """Chunks; a first one that is wider than `head` is cut there."""
        p, width, cached = self.problem, self.problem.sizes.logits_columns, self.cached
        if self.given:
            return steps(0, p.columns, p.columns)
        bounds = steps(0, cached, width) + steps(cached, p.columns, width)
        if bounds and 0 < head < bounds[0][1]:
            bounds[:1] = [(0, head), (head, bounds[0][1])]
        return self._whole_tiles(bounds) if bounds and p.makes_products else bounds

    def _whole_tiles(self, bounds: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """The last columns of a ragged vocabulary in a chunk of their own, if the one before is long: its kernel then
        needs no mask."""
        p, (start, stop) = self.problem, bounds[-1]
        whole = stop // p.block_columns * p.block_columns
        if whole in (start, stop) or p.backend.rounds_of_tiles(p.x.shape[0], whole - start, p.x.device) < MASKED_ROUNDS:
            return bounds
        return [*bounds[:-1], (start, whole), (whole, stop)]

    def _fold(self, chunk: Chunk) -> int:
        """Fold the chunk into the partials; where it ends."""
        p, rows, start, stop = self.problem, self.problem.x.shape[0], chunk.start, chunk.stop
        room = None if self.buffer is None else self.buffer.view(stop - start)
        z = p.x[:, : p.columns] if self.given else p.logits(chunk, room)
        kept = part(part(self.cache, 0, rows), start, stop, dim=1) if stop <= self.cached else None
        here = part(self.partials, start // p.block_columns, p.blocks(stop))
        self.statistics(z, chunk.bias, chunk.class_weight, p.sizes.vocab_start + start, here, kept)
        return stop

    def launch(self) -> None:
        """Launch what the head left."""
        for chunk in self.chunks:
            self._fold(chunk)

    def finish(self) -> tuple[list[Tensor | None], Kept]:
        """logprob, entropy, lse, smooth_logprob, prediction [T], None where not wanted, and what is kept."""
        p, partials, settings = self.problem, self.partials, self.problem.settings
        self.launch()
        self.buffer = None
        whole = partials if partials.shape[0] else _neutral(partials)[None]
        if settings.group:
            whole = distributed.merge_ranks(merge(whole), settings.group)[None]
        outputs, residuals = p.backend.finish(
            whole, p.target, p.index, p.tensors.target.shape[0], p.sizes.vocab_size, settings.wanted
        )
        return outputs, Kept(_padded(residuals, self.size), self.cache, self._block_max())

    def _block_max(self) -> Tensor:  # [blocks of the cache, K]
        """A copy, so that the partials are freed."""
        p, partials = self.problem, self.partials
        block_max = partials.new_empty(p.blocks(self.cache.shape[1]), self.size)
        filled = min(block_max.shape[0], partials.shape[0])
        if filled:
            block_max[:filled, : partials.shape[2]] = partials[:filled, ROW_MAX]
        return block_max


def _cache(problem: Problem, size: int) -> Tensor:  # [K, columns]
    """Room for the logits that are kept; none if there is not the memory: the backward then makes them again."""
    x, dtype = problem.tensors.x, problem.products.gradient_dtype
    try:
        return empty_aligned(x, size, problem.sizes.cache_columns, dtype)
    except torch.OutOfMemoryError:
        warn_once("no memory for the cache of logits; the backward makes them again")
        return empty_aligned(x, size, 0, dtype)


def _neutral(partials: Tensor) -> Tensor:  # [FIELDS, R]
    """The state of an empty shard."""
    state = partials.new_zeros(partials.shape[1:])
    state[ROW_MAX] = -math.inf
    return state
