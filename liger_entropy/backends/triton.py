"""Launches of the Triton kernels."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from ..equations import Transform
from .kernels import gradient_kernel, statistics_kernel

# One partial is one block of this many columns; a row of a chunk is read by one program per block.
BLOCK_COLUMNS = 2048
WARPS = 8


def _device(tensor: Tensor):
    """Triton launches on the current device, so make it the tensor's."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


def _float(vector: Tensor | None, stand_in: Tensor) -> Tensor:
    """An optional vector as contiguous fp32; a pointer that is never followed when it is absent."""
    return stand_in if vector is None else vector.float().contiguous()


def _block(columns: int) -> int:
    return min(BLOCK_COLUMNS, 1 << max(columns - 1, 0).bit_length())


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
    overwrite: bool,  # z is scratch; this backend leaves it alone either way
) -> None:
    rows, columns = z.shape
    with _device(z):
        statistics_kernel[(rows, len(partials))](
            z, z.stride(0), z.stride(1), target, _float(bias, z), _float(class_weight, z),
            _float(transform.temperature, z), partials, z if cache is None else cache,
            0 if cache is None else cache.stride(0), rows, columns, offset,
            transform.logit_scale, transform.softcap, transform.inverse_temperature,
            HAS_BIAS=bias is not None, HAS_WEIGHT=class_weight is not None, HAS_SCALE=transform.logit_scale != 1.0,
            HAS_SOFTCAP=transform.softcap != 0.0, HAS_TEMPERATURE=transform.temperature is not None,
            HAS_CACHE=cache is not None, WANT_SMOOTH=wanted[1], WANT_PREDICTION=wanted[2],
            BLOCK=_block(columns), num_warps=WARPS,
        )  # fmt: skip


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
    out: Tensor,  # [R, C], written; may lie over z
    flags: tuple[bool, bool],  # the entropy's and the smooth part's gradient arrived
) -> None:
    rows, columns = z.shape
    with _device(z):
        gradient_kernel[(rows,)](
            z, z.stride(0), z.stride(1), z if block_max is None else block_max, target, _float(bias, z),
            _float(class_weight, z), _float(transform.temperature, z), residuals, coefficients,
            out, out.stride(0), rows, columns, offset,
            transform.logit_scale, transform.softcap, transform.inverse_temperature,
            HAS_BIAS=bias is not None, HAS_WEIGHT=class_weight is not None, HAS_SCALE=transform.logit_scale != 1.0,
            HAS_SOFTCAP=transform.softcap != 0.0, HAS_TEMPERATURE=transform.temperature is not None,
            HAS_CACHE=block_max is not None, WITH_ENTROPY=flags[0], WITH_SMOOTH=flags[1],
            BLOCK=_block(columns), num_warps=WARPS,
        )  # fmt: skip
