"""Launches of the kernels that make the logits themselves, for half operands on GPUs of compute capability 9.

A tile of logits never leaves the multiprocessor: the forward is about one product's time, and no chunk of fp32 logits
is written or read. Medians of ms on an H200 (torch 2.11, triton 3.6, 2026-12-01, bf16), all kernels in turn so that the
GPU is as hot as in a step:

T, D, V               x w^T by cuBLAS   with logprob and entropy / all statistics, by tile    gradient, cuBLAS's dx, dw
8192, 4096, 128256    12.25             128x256 12.81 / 13.28, 256x128 12.79 / 13.92,         13.09, 12.54, 12.53
                                        two 128x128 at a time 12.88 / 13.07
4096, 2048, 151936    3.63              3.97 / 4.35, 4.01 / 4.80, 3.82 / 4.30                 3.97, 3.59, 3.68

The gradient above was written as a whole tile with 3 stages; in halves, which leaves room for 4, 13.26 and 3.91 beside
cuBLAS's 11.83 and 3.61 of that run. Without `flatten` of the loop over tiles the 128x256 tile took 1.05 times as long,
with the gradient 1.1.
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
