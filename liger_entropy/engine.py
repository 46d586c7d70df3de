"""The loop over chunks of the vocabulary, forward and backward.

For each chunk of columns the forward makes ``z = x w_c^T`` and folds it into per-row partials; the backward makes it
again (or reads the cached copy), turns it into its own gradient ``g``, and adds ``dx += g w_c``, ``dw_c = g^T x``.
``weight`` may be absent: then ``x`` holds given logits and dx is their gradient.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from . import backends, distributed
from .equations import FIELDS, ROW_MAX, Transform, merge, put
from .products import Products


# The backward's chunks may be this many times as wide as the forward's where they need no memory of their own.
WIDER = 2
# Elements; a view that starts at a multiple of it is aligned for 128-bit loads and for cuBLAS in every dtype.
ALIGNED = 64


class Tensors(NamedTuple):
    """The tensor arguments of a call. T tokens, D hidden size, V rows of the weight (classes of given logits)."""

    x: Tensor  # [T, D], or logits [T, V]
    weight: Tensor | None  # [V, D]
    target: Tensor  # [T] int64
    bias: Tensor | None  # [V]
    class_weight: Tensor | None  # [V]
    temperature: Tensor | None  # [T]
    order: Tensor | None  # [K] indices of rows, the kept ones first; None: every row in its place
    count: Tensor | None  # [] int64 on the CPU, how many of `order` are kept


class Sizes(NamedTuple):
    ignore_index: int
    vocab_start: int  # global index of the weight's first row
    vocab_size: int  # global; rows of the weight beyond it are padding
    forward_columns: int  # of a chunk in the forward
    backward_columns: int  # of a chunk that the backward recomputes
    cache_columns: int  # leading columns whose logits are kept for the backward: whole forward chunks, or all


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
        self.index = None  # [R] tokens of the rows, None: all
        if tensors.order is not None and tensors.count is not None:
            self.index = tensors.order[: int(tensors.count)]
        self.products = Products(settings.dtype, tensors.x.device)
        self.backend: ModuleType = backends.get(settings.backend)
        x = self.pick(tensors.x)
        self.x = x if tensors.weight is None else self.products.operand(x)  # [R, D], or logits [R, V]
        self.target = self.backend.code(tensors.target, self.index, self.sizes.ignore_index, self.sizes.vocab_size)  # [R]
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

    def forward_bounds(self) -> list[tuple[int, int]]:
        if self.tensors.weight is None:
            return _steps(0, self.columns, self.columns)
        return _steps(0, self.columns, self.sizes.forward_columns)

    def backward_bounds(self, spare_row_bytes: int) -> list[tuple[int, int]]:
        """Cached columns first, in wide chunks: there the memory is spent already, and every chunk reads and writes
        dx once. An eighth of the cache costs an eighth more memory and leaves 8 passes over dx.

        Then the recomputed ones, of backward_columns; wider as long as the chunk's logits fit in the part of dw that
        is still to be written, which has spare_row_bytes a class (0: no dw, or not to be used so).
        """
        if self.tensors.weight is None:
            return _steps(0, self.columns, self.columns)
        s, block = self.sizes, self.backend.BLOCK_COLUMNS
        cached = min(s.cache_columns, self.columns)
        bounds = _steps(0, cached, max(s.backward_columns, self.blocks(cached // 8) * block))
        start, logits_row_bytes = cached, self.x.shape[0] * self.products.accumulator.itemsize
        while start < self.columns:
            room = (self.columns - start) * spare_row_bytes - ALIGNED * self.products.accumulator.itemsize
            fitting = room // (logits_row_bytes + spare_row_bytes)
            step = max(s.backward_columns, min(s.forward_columns * WIDER, fitting) // block * block)
            bounds.append((start, min(start + step, self.columns)))
            start += step
        return bounds

    def blocks(self, columns: int) -> int:
        return -(-columns // self.backend.BLOCK_COLUMNS)

    def chunk_blocks(self, start: int, stop: int) -> slice:
        return slice(start // self.backend.BLOCK_COLUMNS, self.blocks(stop))

    def cached(self, stop: int) -> bool:
        return stop <= self.sizes.cache_columns

    def chunks(self, bounds: list[tuple[int, int]]) -> Iterator[Chunk]:
        """The bounds with the parameters' views, cut while the device works on the chunk before."""
        t, accumulator = self.tensors, self.products.accumulator
        bias = None if t.bias is None else t.bias.to(accumulator)
        class_weight = None if t.class_weight is None else t.class_weight.to(accumulator)
        for start, stop in bounds:
            views = (None if v is None else v.narrow(0, start, stop - start) for v in (t.weight, bias, class_weight))
            yield Chunk(start, stop, *views)

    def logits(self, buffer: Buffer | None, chunk: Chunk, weight: Tensor | None) -> Tensor:
        """Products of the chunk [R, C] in the buffer, or the given logits. weight [C, D] is an operand."""
        if buffer is None or weight is None:
            return self.x[:, chunk.start : chunk.stop]
        return self.products.logits(self.x, weight, out=buffer.view(chunk.stop - chunk.start))

    def operand(self, chunk: Chunk) -> Tensor | None:
        return None if chunk.weight is None else self.products.operand(chunk.weight)


class Buffer:
    """Room that every chunk uses in turn, as [R, C]."""

    def __init__(self, like: Tensor, bounds: list[tuple[int, int]], dtype: torch.dtype):
        self.rows = like.shape[0]
        self.flat = like.new_empty(self.rows * max((stop - start for start, stop in bounds), default=0), dtype=dtype)
        self.spare: Tensor | None = None  # longer than flat: a tensor whose end is free for now
        self.views: dict[int, Tensor] = {}

    def view(self, columns: int) -> Tensor:
        if columns not in self.views:
            size = self.rows * columns
            flat = self.flat[:size] if size <= self.flat.numel() or self.spare is None else self._end_of_spare(size)
            self.views[columns] = flat.view(self.rows, columns)
        return self.views[columns]

    def _end_of_spare(self, size: int) -> Tensor:
        assert self.spare is not None
        start = (self.spare.numel() - size) // ALIGNED * ALIGNED
        return self.spare[start : start + size]


def _steps(start: int, stop: int, step: int) -> list[tuple[int, int]]:
    return [(c, min(c + step, stop)) for c in range(start, stop, max(step, 1))]


def _padded(values: Tensor, size: int) -> Tensor:
    """Grown along its last dimension: rows beyond the kept ones exist only when the count is unknown outside."""
    return values if values.shape[-1] == size else torch.nn.functional.pad(values, (0, size - values.shape[-1]))


def forward(tensors: Tensors, settings: Settings) -> tuple[list[Tensor | None], Kept]:
    """logprob, entropy, lse, smooth_logprob, prediction [T] (None where not wanted), and what the backward needs."""
    problem = Problem(tensors, settings)
    size = tensors.target.shape[0] if tensors.order is None else tensors.order.shape[0]
    cache = tensors.x.new_empty(size, settings.sizes.cache_columns, dtype=problem.products.gradient_dtype)
    partials = _partials(problem, cache)
    whole = partials if partials.shape[0] else _neutral(partials)[None]
    if settings.group:
        whole = distributed.merge_ranks(merge(whole), settings.group)[None]
    outputs, residuals = problem.backend.finish(
        whole, problem.target, problem.index, tensors.target.shape[0], settings.sizes.vocab_size, settings.wanted
    )
    block_max = partials[: problem.blocks(settings.sizes.cache_columns), ROW_MAX].clone()
    return outputs, Kept(_padded(residuals, size), cache, _padded(block_max, size))


def _partials(problem: Problem, cache: Tensor) -> Tensor:  # [blocks, FIELDS, R]
    p, rows, bounds = problem, problem.x.shape[0], problem.forward_bounds()
    partials = p.x.new_zeros(p.blocks(p.columns), FIELDS, rows, dtype=p.products.accumulator)
    buffer = None if p.tensors.weight is None else Buffer(p.x, bounds, p.products.accumulator)
    statistics = p.backend.Statistics(p.target, p.transform, p.settings.wanted, overwrite=buffer is not None)
    for chunk in p.chunks(bounds):
        z = p.logits(buffer, chunk, p.operand(chunk))
        kept = cache[:rows, chunk.start : chunk.stop] if p.cached(chunk.stop) else None
        part = partials[p.chunk_blocks(chunk.start, chunk.stop)]
        statistics(z, chunk.bias, chunk.class_weight, p.sizes.vocab_start + chunk.start, part, kept)
    return partials


def _neutral(partials: Tensor) -> Tensor:  # [FIELDS, R]
    """The state of an empty shard."""
    state = partials.new_zeros(partials.shape[1:])
    state[ROW_MAX] = -math.inf
    return state


def backward(
    upstream: Upstream, tensors: Tensors, kept: Kept, settings: Settings, needs: tuple[bool, bool, bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of x, weight and bias, None where not needed."""
    p = Problem(tensors, settings)
    residuals = kept.residuals[:, : p.x.shape[0]].contiguous()
    coefficients = p.backend.coefficients(upstream, p.target, p.index, residuals, settings.sizes.vocab_size, p.transform)
    flags = upstream.entropy is not None, upstream.smooth is not None
    gradient, gradients = p.backend.Gradient(p.target, p.transform, residuals, coefficients, flags), Gradients(p, needs)
    for chunk in p.chunks(gradients.bounds):
        weight = p.operand(chunk)
        z, block_max, out = gradients.sources(kept, chunk, weight)
        gradient(z, block_max, chunk.bias, chunk.class_weight, settings.sizes.vocab_start + chunk.start, out)
        gradients.add(out, chunk, weight)
    return gradients.finish()


class Gradients:
    """The buffers of a backward and what accumulates in them."""

    def __init__(self, problem: Problem, needs: tuple[bool, bool, bool]):
        p, t = problem, problem.tensors
        need_x, need_weight, need_bias = needs
        self.problem = p
        self.given = t.weight is None
        self.sum = None  # of the ranks' dx, under way
        self.dw = _zeros_beyond(t.weight, p.columns) if need_weight else None
        spare = _as_spare(self.dw, p)
        self.bounds = p.backward_bounds(0 if spare is None else spare.nbytes // p.columns)
        cached = [bound for bound in self.bounds if p.cached(bound[1])]
        own = [b for b in self.bounds[len(cached) :] if b[1] - b[0] <= p.sizes.backward_columns]
        self.products = None if self.given else Buffer(p.x, own, p.products.accumulator)
        self.gradient = None if self.given else Buffer(p.x, cached, p.products.gradient_dtype)
        if self.products is not None:
            self.products.spare = spare
        self.halves: dict[int, Tensor] = {}  # the buffer of products, seen as the half gradients in its rows
        dtype = t.x.dtype if self.given else p.products.accumulator
        self.dx = (p.x.new_empty if p.columns else p.x.new_zeros)(p.x.shape, dtype=dtype) if need_x else None
        if self.given and self.dx is not None:
            self.dx[:, p.columns :] = 0
        self.db = _zeros_beyond(t.bias, p.columns) if need_bias else None

    def sources(self, kept: Kept, chunk: Chunk, weight: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
        """The chunk's logits, their block maxima if they come from the cache, and where the gradient goes."""
        p, rows, columns = self.problem, self.problem.x.shape[0], chunk.stop - chunk.start
        if self.products is None or self.gradient is None:
            assert self.dx is not None
            return p.logits(None, chunk, None), None, self.dx[:, chunk.start : chunk.stop]
        if p.cached(chunk.stop):
            block_max = kept.block_max[p.chunk_blocks(chunk.start, chunk.stop), :rows]
            return kept.cache[:rows, chunk.start : chunk.stop], block_max, self.gradient.view(columns)
        z = p.logits(self.products, chunk, weight)
        if p.products.gradient_dtype == z.dtype:
            return z, None, z
        # The half gradient is written over the fp32 products, row by row: no second buffer.
        if columns not in self.halves:
            self.halves[columns] = z.view(p.products.gradient_dtype)[:, :columns]
        return z, None, self.halves[columns]

    def add(self, g: Tensor, chunk: Chunk, weight: Tensor | None) -> None:
        """Everything that the chunk's gradient g [R, C] contributes. weight [C, D] is an operand."""
        p = self.problem
        if self.db is not None:
            self.db[chunk.start : chunk.stop] = g.sum(dim=0, dtype=p.products.accumulator)
        if weight is None:
            return
        if self.dx is not None:
            p.products.add_input_gradient(g, weight, self.dx, first=chunk.start == 0)
            if chunk.stop == p.columns:
                self.start_sum()
        if self.dw is not None:
            p.products.weight_gradient(g, p.x, out=self.dw[chunk.start : chunk.stop])

    def start_sum(self) -> None:
        """Add up the ranks' parts of dx, beside the last chunk's dw. An empty shard comes here without a chunk."""
        if self.problem.settings.group and self.dx is not None and self.dx.numel() and not self.given:
            self.sum = distributed.start_sum(self.dx, self.problem.settings.group)

    def finish(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        p, dx = self.problem, self.dx
        if p.columns == 0:
            self.start_sum()
        if self.sum is not None:
            self.sum.wait()
        if dx is not None:
            dx = put(dx.to(p.tensors.x.dtype), p.index, p.tensors.x.shape[0])
        return dx, self.dw, self.db


def _as_spare(dw: Tensor | None, problem: Problem) -> Tensor | None:
    """The rows of dw that chunks will write, as one flat tensor for fp32 products: dw is filled from its start, so until
    the last chunks its end is room that costs nothing. Given explicit chunk sizes, these are kept to instead."""
    p = problem
    if dw is None or p.columns == 0 or p.sizes.forward_columns <= p.sizes.backward_columns:
        return None
    used = dw[: p.columns]
    if not used.is_contiguous() or used.nbytes % p.products.accumulator.itemsize:
        return None
    return used.view(-1).view(p.products.accumulator)


def _zeros_beyond(parameter: Tensor | None, columns: int) -> Tensor | None:
    """Room for a parameter's gradient; only rows that no chunk will write are cleared."""
    if parameter is None:
        return None
    gradient = torch.empty_like(parameter)
    gradient[columns:] = 0
    return gradient
