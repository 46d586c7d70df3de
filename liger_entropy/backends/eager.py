"""Plain torch on tiles that stay in the processor's cache. The default wherever Triton has no device."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from .. import equations
from ..equations import (
    IGNORED,
    INVALID,
    Transform,
    block_gradient_,
    block_statistics,
    put,
    softcap_derivative,
    transform_,
)

# One partial is one block of at most this many columns.
BLOCK_COLUMNS = 1024
GIVEN_COLUMNS = BLOCK_COLUMNS  # the same of given logits
MAKES_PRODUCTS = False
# A tile and its scratch, 2 x 1 MiB in fp32, fit the L2 and L3 share of two cores; larger tiles ran 1.4 to 4 times
# slower through the same passes (T=2048, V=32000, fp32, Zen 3).
TILE_ELEMENTS = 256 * 1024


def _tiles(rows: int, columns: int):
    """(block, columns of the block, rows of the tile) over a chunk."""
    for block, c in enumerate(range(0, columns, BLOCK_COLUMNS)):
        part = slice(c, min(c + BLOCK_COLUMNS, columns))
        step = max(1, TILE_ELEMENTS // (part.stop - c))
        for r in range(0, rows, step):
            yield block, part, slice(r, min(r + step, rows))


def _owned(tile: Tensor, dtype: torch.dtype, overwrite: bool) -> Tensor:
    """The tile in the accumulation dtype, free to be overwritten."""
    return tile if overwrite else tile.to(dtype, copy=True)


def _part(vector: Tensor | None, part: slice) -> Tensor | None:
    return None if vector is None else vector[part]


class Statistics:
    """Fills the partials of a call, chunk by chunk."""

    def __init__(
        self,
        target: Tensor,  # [R] index into the vocabulary, IGNORED or INVALID
        transform: Transform,
        wanted: tuple[bool, bool, bool],
        overwrite: bool,  # z is scratch
    ):
        self.target, self.transform, self.wanted, self.overwrite = target, transform, wanted, overwrite

    def __call__(
        self,
        z: Tensor,  # [R, C] products of the chunk, or given logits
        bias: Tensor | None,  # [C]
        class_weight: Tensor | None,  # [C]
        offset: int,  # index of the chunk's first class in the vocabulary
        partials: Tensor,  # [blocks of the chunk, FIELDS, R], written where wanted
        cache: Tensor | None,  # [R, C], written with z - block maximum
    ) -> None:
        for block, part, rows in _tiles(*z.shape):
            tile = _owned(z[rows, part], partials.dtype, self.overwrite)
            transform_(tile, _part(bias, part), self.transform.rows(rows))
            first = offset + part.start
            block_statistics(
                tile, self.target[rows] - first, _part(class_weight, part), torch.empty_like(tile), first,
                partials[block, :, rows], self.wanted,
            )  # fmt: skip
            if cache is not None:
                cache[rows, part].copy_(tile)


class Gradient:
    """Turns the logits of a call into gradients, chunk by chunk."""

    def __init__(
        self,
        target: Tensor,  # [R] index into the vocabulary, IGNORED or INVALID
        transform: Transform,
        residuals: Tensor,  # [4, R]
        coefficients: Tensor,  # [4, R]
        flags: tuple[bool, bool],  # the entropy's and the smooth part's gradient arrived
    ):
        self.target, self.transform, self.flags = target, transform, flags
        self.row_max, self.log_norm = residuals[:2]
        self.coefficients = coefficients

    def __call__(
        self,
        z: Tensor,  # [R, C] products of the chunk, given logits, or the cached z - block maximum
        block_max: Tensor | None,  # [blocks of the chunk, R] when z comes from the cache
        bias: Tensor | None,  # [C]
        class_weight: Tensor | None,  # [C]
        offset: int,
        out: Tensor,  # [R, C], written; may be z itself
    ) -> None:
        overwrite = out is z
        for block, part, rows in _tiles(*z.shape):
            t, transform = _owned(z[rows, part], self.row_max.dtype, overwrite), self.transform.rows(rows)
            if block_max is None:
                transform_(t, _part(bias, part), transform)
            else:
                t.add_(block_max[block, rows, None])
            derivative = softcap_derivative(t, transform) if transform.softcap else None
            t.sub_(self.row_max[rows, None])
            block_gradient_(
                t, self.target[rows] - (offset + part.start), _part(class_weight, part), self.log_norm[rows],
                self.coefficients[:, rows], torch.empty_like(t), *self.flags,
            )  # fmt: skip
            if derivative is not None:
                t.mul_(derivative)
            if not overwrite:
                out[rows, part].copy_(t)


def inspect(
    target: Tensor, temperature: Tensor | None, ignore_index: int, vocab_size: int, read: bool
) -> tuple[Tensor, Callable[[], tuple[int, int, int]]]:
    """Coded labels [T], and a function that waits for how many are ignored, how many invalid, and how many temperatures
    [T] are not positive."""
    coded = equations.coded(target, ignore_index, vocab_size)

    def counts() -> tuple[int, int, int]:
        cold = coded[:0] if temperature is None else ~((temperature > 0) & (temperature < math.inf))
        ignored, invalid, cold = torch.stack([(coded == IGNORED).sum(), (coded == INVALID).sum(), cold.sum()]).tolist()
        return ignored, invalid, cold

    return coded, counts


def finish(
    partials: Tensor,  # [blocks, FIELDS, R]
    target: Tensor,  # [R] coded
    index: Tensor | None,  # [R]
    tokens: int,
    vocab_size: int,
    wanted: tuple[bool, bool, bool],
) -> tuple[list[Tensor | None], Tensor]:
    """The five statistics [T], None where not wanted, and the residuals [4, R]."""
    *statistics, residuals = equations.finalize(equations.merge(partials), target, vocab_size, wanted)
    fills = (0, 0, 0, 0, -1)
    return [None if s is None else put(s, index, tokens, f) for s, f in zip(statistics, fills, strict=True)], residuals


def coefficients(
    upstream: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None],  # [T] each
    target: Tensor,  # [R] coded
    index: Tensor | None,  # [R]
    residuals: Tensor,  # [4, R]
    vocab_size: int,
    transform: Transform,
) -> Tensor:  # [4, R]
    picked = [g if g is None or index is None else g.index_select(0, index) for g in upstream]
    logprob, entropy, lse, smooth = (None if g is None else g.to(residuals.dtype) for g in picked)
    return equations.row_coefficients(logprob, entropy, lse, smooth, target, residuals, vocab_size, transform)
