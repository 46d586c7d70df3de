"""The backward loop over chunks of the vocabulary, and the room that it works in.

dx accumulates in fp32 and every chunk reads and writes all of it, so chunks should be wide; their logits and gradients
take memory, so they should be narrow. Most of them can be both: dw is filled from its first row, and until the last
chunks its end is room that costs nothing. There a wide chunk keeps its gradient, and its logits piece by piece, unless
the backend's kernels make them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import distributed
from .engine import Buffer, Chunk, Kept, Problem, Settings, Tensors, Upstream, part, steps
from .equations import put
from .notices import warn_once

# Chunks of the cache, each with a pass over dx; with 2, half as much memory comes on top. The cached step of
# benchmarks/gpu_limits.py, in turn in one process (H200, torch 2.11, 2026-12-01), with 8, 4 and 2: 40.28, 38.97 and
# 38.21 ms (T=8192, D=4096, V=128256), 46.98, 45.49 and 44.54 (D=2304, V=256000). COPIED_CHUNKS where each chunk also
# takes a copy of its part of the weight.
CACHED_CHUNKS, COPIED_CHUNKS = 2, 8
# Bytes; a view that starts at a multiple of it is aligned for 128-bit loads and for cuBLAS in every dtype.
ALIGNED = 256


def backward(
    upstream: Upstream, tensors: Tensors, kept: Kept, settings: Settings, needs: tuple[bool, bool, bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of x, weight and bias, None where not needed."""
    p = Problem(tensors, settings)
    residuals = kept.residuals[:, : p.x.shape[0]].contiguous()
    coefficients = p.backend.coefficients(
        upstream, p.target, p.index, residuals, settings.sizes.vocab_size, p.transform
    )
    flags = upstream.entropy is not None, upstream.smooth is not None
    kernel = p.backend.Gradient(p.target, p.transform, residuals, coefficients, flags)
    if tensors.weight is None:
        return _given_logits(p, kernel), None, None
    return Accumulation(p, kept, kernel, needs).run()


def _given_logits(p: Problem, kernel) -> Tensor:
    """The gradient of given logits, as wide as they are; padding gets 0."""
    gradient = torch.empty_like(p.tensors.x, memory_format=torch.contiguous_format)
    gradient[:, p.columns :] = 0
    for chunk in p.chunks(steps(0, p.columns, p.columns)):
        out, z = gradient[:, : p.columns], p.x[:, : p.columns]
        kernel(z, None, chunk.bias, chunk.class_weight, p.sizes.vocab_start, out)
    return gradient


class Accumulation:
    """The gradients of a head, chunk by chunk."""

    def __init__(self, problem: Problem, kept: Kept, kernel, needs: tuple[bool, bool, bool]):
        p, t = problem, problem.tensors
        need_x, need_weight, need_bias = needs
        self.problem, self.kept, self.kernel = p, kept, kernel
        self.dw = _zeros_beyond(t.weight, p.columns) if need_weight else None
        self.db = _zeros_beyond(t.bias, p.columns) if need_bias else None
        self.sum = None  # of the ranks' dx, under way
        cached = kept.cache.shape[1] >= p.columns
        self.free = None if cached or p.sizes.wide_columns == 0 else _free_end(self.dw, p)
        self.piece = 0 if p.makes_products else p.sizes.logits_columns
        self.cached, self.wide, self.narrow = self._bounds()
        self.room = Buffer(p.x, self.narrow, p.products.gradient_dtype if p.makes_products else p.products.accumulator)
        self.dx = self._input_gradient() if need_x else None
        self.cached_room = self._cached_room()

    def _input_gradient(self) -> Tensor:
        """[R, D]; where there is nothing to accumulate in the input's own dtype."""
        p, chunks = self.problem, len(self.cached) + len(self.wide) + len(self.narrow)
        alone = chunks == 1 and not p.settings.group
        make = p.x.new_empty if chunks else p.x.new_zeros
        return make(p.x.shape, dtype=p.tensors.x.dtype if alone else p.products.accumulator)

    def _cached_room(self) -> Buffer:
        """For the gradient of a cached chunk; if there is not the memory, the chunks become narrow ones."""
        p, narrow = self.problem, self.problem.sizes.gradient_columns
        try:
            return Buffer(p.x, self.cached, p.products.gradient_dtype)
        except torch.OutOfMemoryError:
            warn_once("little memory beside the cache of logits; the backward goes through it in narrow chunks")
            self.cached = steps(0, self.cached[-1][1], narrow)
            return Buffer(p.x, self.cached, p.products.gradient_dtype)

    def _bounds(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]], list[tuple[int, int]]]:
        """Consecutive chunks: cached ones, wide ones in the free end of dw, narrow ones in room of their own."""
        p, s = self.problem, self.problem.sizes
        cached = min(self.kept.cache.shape[1], p.columns)
        parts = COPIED_CHUNKS if p.products.copies(p.tensors.weight) else CACHED_CHUNKS
        share = p.blocks(-(-cached // parts)) * p.block_columns
        narrow = s.gradient_columns
        if narrow < p.columns:
            narrow = self._whole_rounds(narrow) or narrow
        first = steps(0, cached, max(s.gradient_columns, share))
        wide, start = [], cached
        while (step := self._fitting(p.columns - start)) > narrow:
            wide.append((start, start + step))
            start += step
        return first, wide, steps(start, p.columns, narrow)

    def _whole_rounds(self, columns: int) -> int:
        p = self.problem
        return p.backend.columns_of_whole_rounds(p.x.shape[0], columns, p.x.device) if p.makes_products else columns

    def _fitting(self, remaining: int) -> int:
        """Columns of a wide chunk whose gradient, with one piece of logits, fits in dw behind the chunk's own rows."""
        if self.free is None:
            return 0
        p, s, rows = self.problem, self.problem.sizes, self.problem.x.shape[0]
        row_bytes = self.free.numel() // p.columns
        pieces = rows * self.piece * p.products.accumulator.itemsize + 2 * ALIGNED
        columns = (remaining * row_bytes - pieces) // (rows * p.products.gradient_dtype.itemsize + row_bytes)
        columns = min(columns, s.wide_columns)
        return columns // self.piece * self.piece if self.piece else self._whole_rounds(columns)

    def run(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        p = self.problem
        for bounds, gradient in ((self.cached, self._cached), (self.wide, self._wide), (self.narrow, self._narrow)):
            for chunk in p.chunks(bounds):
                self._add(gradient(chunk), chunk)
        if p.columns == 0:
            self._start_sum()
        del self.room, self.cached_room  # before dx is there twice
        if self.sum is not None:
            self.sum.wait()
        dx = None if self.dx is None else put(self.dx.to(p.tensors.x.dtype), p.index, p.tensors.x.shape[0])
        return dx, self.dw, self.db

    def _apply(self, z, block_max: Tensor | None, chunk: Chunk, out: Tensor) -> None:
        self.kernel(z, block_max, chunk.bias, chunk.class_weight, self.problem.sizes.vocab_start + chunk.start, out)

    def _cached(self, chunk: Chunk) -> Tensor:
        p, rows = self.problem, self.problem.x.shape[0]
        out = self.cached_room.view(chunk.stop - chunk.start)
        first, last = chunk.start // p.block_columns, p.blocks(chunk.stop)
        block_max = part(part(self.kept.block_max, first, last), 0, rows, dim=1)
        cached = part(part(self.kept.cache, 0, rows), chunk.start, chunk.stop, dim=1)
        self._apply(cached, block_max, chunk, out)
        return out

    def _narrow(self, chunk: Chunk) -> Tensor:
        """The gradient over the products themselves; a half one in the first half of each row."""
        p, columns = self.problem, chunk.stop - chunk.start
        room, dtype = self.room.view(columns), self.problem.products.gradient_dtype
        z, out = p.logits(chunk, room), room if room.dtype == dtype else room.view(dtype)[:, :columns]
        self._apply(z, None, chunk, out)
        return out

    def _wide(self, chunk: Chunk) -> Tensor:
        p, columns = self.problem, chunk.stop - chunk.start
        out, end = self._from_free(columns, p.products.gradient_dtype, before=None)
        z, _ = self._from_free(self.piece, p.products.accumulator, before=end)
        step = self.piece or columns
        for piece in p.chunks(steps(chunk.start, chunk.stop, step)):
            start = piece.start - chunk.start
            self._apply(p.logits(piece, z), None, piece, out[:, start : start + step])
        return out

    def _from_free(self, columns: int, dtype: torch.dtype, before: int | None) -> tuple[Tensor, int]:
        """[R, columns] at the end of the free bytes, or before a position in them, and where it starts."""
        assert self.free is not None
        rows = self.problem.x.shape[0]
        end = self.free.numel() if before is None else before
        size = rows * columns * dtype.itemsize
        start = (end - size) // ALIGNED * ALIGNED
        return self.free[start : start + size].view(dtype).view(rows, columns), start

    def _add(self, g: Tensor, chunk: Chunk) -> None:
        """Everything that the chunk's gradient g [R, C] contributes."""
        p = self.problem
        if self.db is not None:
            self.db[chunk.start : chunk.stop] = g.sum(dim=0, dtype=p.products.accumulator)
        if self.dx is not None:
            p.products.add_input_gradient(g, p.operand(chunk), self.dx, first=chunk.start == 0)
            if chunk.stop == p.columns:
                self._start_sum()
        if self.dw is not None:
            p.products.weight_gradient(g, p.x, out=part(self.dw, chunk.start, chunk.stop))

    def _start_sum(self) -> None:
        """Add up the ranks' parts of dx, beside the last chunk's dw. An empty shard comes here without a chunk."""
        if self.problem.settings.group and self.dx is not None and self.dx.numel():
            self.sum = distributed.start_sum(self.dx, self.problem.settings.group)


def _free_end(dw: Tensor | None, problem: Problem) -> Tensor | None:
    """The bytes of dw that chunks will write, None if dw is not laid out row by row."""
    p = problem
    if dw is None or p.columns == 0:
        return None
    used = dw[: p.columns]
    return used.view(-1).view(torch.uint8) if used.is_contiguous() else None


def _zeros_beyond(parameter: Tensor | None, columns: int) -> Tensor | None:
    """Room for a parameter's gradient; only rows that no chunk will write are cleared."""
    if parameter is None:
        return None
    gradient = torch.empty_like(parameter)
    if columns < gradient.shape[0]:
        gradient[columns:] = 0
    return gradient
