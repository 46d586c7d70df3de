"""Launches of the kernels that make the logits themselves, for half operands on GPUs of compute capability 9.

A tile of logits never leaves the multiprocessor: the forward is about one product's time, and no chunk of fp32 logits
is written or read. ms on an H200 (torch 2.11, triton 3.6, 2026-12-01, bf16), kernels of a step beside cuBLAS's x w^T:

T, D, V               cuBLAS   with logprob and entropy   gradient   a step with this tile / two 128x128 at a time
4096, 2048, 151936    3.35     3.59                       3.62       16.44 / 16.51
2048, 4096, 131072    3.02     3.08                       3.16       13.98 / 14.01
16384, 3584, 152064   27.1     29.9                       28.6       107.1 / 112.8
8192, 2304, 256000    15.2     16.4                       16.4       58.6 / 61.5

What the GPU's power allows differs from one GPU to the next by a tenth; only figures of one line are of one run. The
rest of the time over cuBLAS is the work on the tile, in which the tensor cores wait: with none of it the statistics of
T=8192, D=4096, V=128256 took 1.015 times the product, and with it 1.05 to 1.09. Without `flatten` of the loop over
tiles it was 1.05 times as long. GROUP at 16 and 32 was no faster than at 8.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from . import triton
from .hopper_kernels import product_gradient_kernel, product_statistics_kernel
from .triton import as_float, coefficients, finish, inspect, launch, transform_flags

__all__ = ["BLOCK_COLUMNS", "MAKES_PRODUCTS", "Gradient", "Operands", "Statistics", "coefficients", "finish", "inspect"]

# One partial is this many columns.
BLOCK_COLUMNS = 256


class Tile(NamedTuple):
    """What a program makes at a time; a multiprocessor has room for one program."""

    rows: int
    columns: int
    depth: int
    stages: int  # of its operands, that lie in shared memory at a time
    warps: int


# Of the 227 KiB of shared memory the operands take 192, and half a tile that is to be written 32.
TILE = Tile(128, BLOCK_COLUMNS, depth=64, stages=4, warps=8)
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
    x = _descriptor(z.x, TILE.rows, TILE.depth)
    w = _descriptor(z.w, TILE.columns, TILE.depth)
    half = [TILE.rows, TILE.columns // 2]
    out = x if written is None else TensorDescriptor(written, list(written.shape), list(written.stride()), half)
    constants = constants | dict(BLOCK_ROWS=TILE.rows, BLOCK_COLUMNS=TILE.columns, BLOCK_DEPTH=TILE.depth)
    tiles = -(-rows // TILE.rows) * -(-columns // TILE.columns)
    launch(
        kernel, (min(tiles, _multiprocessors(z.x.device)), 1, 1), (z.x.dtype, depth),
        (x, w, out, *pointers, rows, columns, depth, *numbers), constants, TILE.warps, TILE.stages,
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

    cached_block = 4, BLOCK_COLUMNS

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
