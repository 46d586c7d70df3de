"""Plain torch on tiles that stay in the processor's cache. The default wherever Triton has no device."""

from __future__ import annotations

import torch
from torch import Tensor

from ..equations import Transform, block_gradient_, block_statistics, softcap_derivative, transform_

# One partial is one block of at most this many columns.
BLOCK_COLUMNS = 1024
# A tile and its scratch, 2 x 1 MiB in fp32, fit the L2 and L3 share of two cores; larger tiles ran 1.4 to 4 times
# slower through the same passes (T=2048, V=32000, fp32, Zen 3).
TILE_ELEMENTS = 256 * 1024


def _tiles(rows: int, columns: int):
    step = max(1, TILE_ELEMENTS // max(columns, 1))
    return ((r, min(r + step, rows)) for r in range(0, rows, step))


def _owned(tile: Tensor, dtype: torch.dtype, overwrite: bool) -> Tensor:
    """The tile in the accumulation dtype, free to be overwritten."""
    return tile if overwrite else tile.to(dtype, copy=True)


def chunk_statistics(
    z: Tensor,  # [R, C] products of the chunk, or given logits
    target: Tensor,  # [R] index into the vocabulary, IGNORED or INVALID
    bias: Tensor | None,  # [C]
    class_weight: Tensor | None,  # [C]
    transform: Transform,
    offset: int,  # index of the chunk's first class in the vocabulary
    partials: Tensor,  # [blocks of the chunk, FIELDS, R], written
    cache: Tensor | None,  # [R, C], written with z - block maximum
    wanted: tuple[bool, bool, bool],
    overwrite: bool,  # z is scratch
) -> None:
    for block, c in enumerate(range(0, z.shape[1], BLOCK_COLUMNS)):
        part = slice(c, min(c + BLOCK_COLUMNS, z.shape[1]))
        part_bias = None if bias is None else bias[part]
        part_weight = None if class_weight is None else class_weight[part]
        for r0, r1 in _tiles(len(z), part.stop - c):
            tile = transform_(_owned(z[r0:r1, part], partials.dtype, overwrite), part_bias, transform.rows(r0, r1))
            out = partials[block, :, r0:r1]
            scratch = torch.empty_like(tile)
            block_statistics(tile, target[r0:r1] - (offset + c), part_weight, scratch, offset + c, out, wanted)
            if cache is not None:
                cache[r0:r1, part].copy_(tile)


def chunk_gradient(
    z: Tensor,  # [R, C] products of the chunk, given logits, or the cached z - block maximum
    block_max: Tensor | None,  # [blocks of the chunk, R] when z comes from the cache
    target: Tensor,  # [R] index into the vocabulary, IGNORED or INVALID
    bias: Tensor | None,  # [C]
    class_weight: Tensor | None,  # [C]
    transform: Transform,
    offset: int,
    residuals: Tensor,  # [4, R]
    coefficients: Tensor,  # [4, R]
    out: Tensor,  # [R, C], written; may be z itself
    flags: tuple[bool, bool],  # the entropy's and the smooth part's gradient arrived
) -> None:
    row_max, log_norm = residuals[:2]
    overwrite = out is z
    for block, c in enumerate(range(0, z.shape[1], BLOCK_COLUMNS)):
        part = slice(c, min(c + BLOCK_COLUMNS, z.shape[1]))
        part_bias = None if bias is None else bias[part]
        part_weight = None if class_weight is None else class_weight[part]
        for r0, r1 in _tiles(len(z), part.stop - c):
            t = _owned(z[r0:r1, part], row_max.dtype, overwrite)
            rows = transform.rows(r0, r1)
            if block_max is None:
                transform_(t, part_bias, rows)
            else:
                t.add_(block_max[block, r0:r1, None])
            derivative = softcap_derivative(t, rows) if transform.softcap else None
            t.sub_(row_max[r0:r1, None])
            local, row_coefficients = target[r0:r1] - (offset + c), coefficients[:, r0:r1]
            block_gradient_(t, local, part_weight, log_norm[r0:r1], row_coefficients, torch.empty_like(t), *flags)
            if derivative is not None:
                t.mul_(derivative)
            if not overwrite:
                out[r0:r1, part].copy_(t)
