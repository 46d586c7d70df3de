"""Launches of the kernels that make the logits themselves, for half operands on GPUs of compute capability 9.

A tile of logits never leaves the multiprocessor: the forward is about one product's time, and no chunk of fp32 logits
is written or read. The step of benchmarks/gpu_limits.py without a cache, ms, in turn in one process (H200, torch 2.11,
triton 3.6, 2026-12-01), by the tile of the forward:

T, D, V                128 x 256, one at a time    128 x 128, two at a time
8192, 4096, 128256     51.4                        53.0
16384, 3584, 152064    107.1                       112.8
4096, 2048, 151936     16.44                       16.51
2048, 4096, 131072     13.98                       14.01
8192, 2304, 256000     58.6                        61.5

Without `flatten` of the loop over tiles the forward's kernel took 1.05 times as long, the gradient's 1.1; a GROUP of 16
or 32 was no faster than 8.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from . import triton
from .hopper_kernels import product_gradient_kernel, product_statistics_kernel
from .triton import as_float, coefficients, finish, inspect, launch, transform_flags

__all__ = [
    "BLOCK_COLUMNS", "MAKES_PRODUCTS", "Gradient", "Operands", "Statistics", "coefficients", "columns_of_whole_rounds",
    "finish", "inspect", "rounds_of_tiles",
]  # fmt: skip

# One partial is this many columns.
BLOCK_COLUMNS = 256


# A program makes TILE_ROWS x BLOCK_COLUMNS logits at a time, and a multiprocessor has room for one program: of its 227
# KiB of shared memory STAGES operands of TILE_DEPTH take 192, and half a tile that is to be written 32.
TILE_ROWS, TILE_DEPTH, STAGES, WARPS = 128, 64, 4, 8
# Bytes; TMA wants bases and row strides at multiples of it.
ALIGNED = 16
MAKES_PRODUCTS = True


class Operands(NamedTuple):
    """Logits that a kernel will make: products of x [R, D] and w [C, D], both half."""

    x: Tensor
    w: Tensor


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def rounds_of_tiles(rows: int, columns: int, device: torch.device) -> float:
    """How many whole tiles of a product each multiprocessor makes."""
    return -(-rows // TILE_ROWS) * (columns // BLOCK_COLUMNS) / _multiprocessors(device)


def columns_of_whole_rounds(rows: int, columns: int, device: torch.device) -> int:
    """These columns in whole tiles, or fewer of them, that a chunk should have: in its last round of tiles many
    multiprocessors may have none. What is left to other chunks counts as its share of a round, about what a chunk
    costs beside its tiles. A step without a cache, as above: 58.7 ms in place of 60.2 (D=2304), 107.6 in place of 110.6
    (D=3584)."""
    rounds = rounds_of_tiles(rows, columns, device)
    full = math.floor(rounds)
    fewer = full * _multiprocessors(device) // max(-(-rows // TILE_ROWS), 1) * BLOCK_COLUMNS
    left = rounds - rounds_of_tiles(rows, fewer, device)
    saved = math.ceil(rounds) - full - left
    return fewer if fewer and saved > left / rounds else columns // BLOCK_COLUMNS * BLOCK_COLUMNS


def _descriptor(tensor: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Tiles of [rows, columns] of a matrix; a copy's where TMA cannot read it in place."""
    row_bytes = tensor.stride(0) * tensor.element_size()
    if tensor.stride(1) != 1 or tensor.data_ptr() % ALIGNED or row_bytes % ALIGNED:
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [rows, columns])


def _launch_product(
    kernel, z: Operands, written: Tensor | None, pointers: tuple, numbers: tuple, constants: dict
) -> None:
    """One launch over all tiles of the product; `written` [R, C] is filled tile by tile."""
    (rows, depth), columns = z.x.shape, z.w.shape[0]
    x = _descriptor(z.x, TILE_ROWS, TILE_DEPTH)
    w = _descriptor(z.w, BLOCK_COLUMNS, TILE_DEPTH)
    half = [TILE_ROWS, BLOCK_COLUMNS // 2]
    out = x if written is None else TensorDescriptor(written, list(written.shape), list(written.stride()), half)
    constants = constants | dict(BLOCK_ROWS=TILE_ROWS, BLOCK_COLUMNS=BLOCK_COLUMNS, BLOCK_DEPTH=TILE_DEPTH)
    tiles = -(-rows // TILE_ROWS) * -(-columns // BLOCK_COLUMNS)
    launch(
        kernel, (min(tiles, _multiprocessors(z.x.device)), 1, 1), (z.x.dtype, depth),
        (x, w, out, *pointers, rows, columns, depth, *numbers), constants, WARPS, STAGES,
    )  # fmt: skip


class Statistics(triton.Statistics):
    """As the base, of :class:`Operands`."""

    def __call__(self, z: Any, bias, class_weight, offset, partials, cache) -> None:
        entropy, smooth, prediction = self.wanted
        t = self.transform
        constants = transform_flags(bias, class_weight, t) | dict(
            HAS_CACHE=cache is not None, WANT_ENTROPY=entropy, WANT_SMOOTH=smooth, WANT_PREDICTION=prediction,
            RAGGED=z.w.shape[0] % BLOCK_COLUMNS != 0,
        )  # fmt: skip
        pointers = (
            self.target, as_float(bias, partials), as_float(class_weight, partials), self.temperature, partials
        )  # fmt: skip
        numbers = offset, t.logit_scale, t.softcap, t.inverse_temperature
        _launch_product(product_statistics_kernel, z, cache, pointers, numbers, constants)


class Gradient(triton.Gradient):
    """As the base, of :class:`Operands` or of the cache."""

    # On an H200 (T=8192, 64128 columns, torch 2.11, triton 3.6, 2026-12-01) 0.516 ms, with one block 0.544, with four
    # 0.523; with 8 rows and 2 warps 0.60, with 16 and 4 0.61.
    cached_rows, cached_columns, cached_blocks = 4, BLOCK_COLUMNS, 2

    def __call__(self, z: Any, block_max, bias, class_weight, offset, out) -> None:
        if block_max is not None:
            super().__call__(z, block_max, bias, class_weight, offset, out)
            return
        t = self.transform
        constants = transform_flags(bias, class_weight, t) | dict(WITH_ENTROPY=self.flags[0], WITH_SMOOTH=self.flags[1])
        stand_in = self.residuals
        pointers = (
            self.target, as_float(bias, stand_in), as_float(class_weight, stand_in), self.temperature,
            self.residuals, self.coefficients,
        )  # fmt: skip
        numbers = offset, t.logit_scale, t.softcap, t.inverse_temperature
        _launch_product(product_gradient_kernel, z, out, pointers, numbers, constants)
