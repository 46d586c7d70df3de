"""Launches of the Triton kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..equations import Transform
from . import eager
from .kernels import gradient_kernel, statistics_kernel
from .row_kernels import coefficient_kernel, finish_kernel, inspect_kernel

# One partial of a chunk of products is one block of this many columns, which one warp works on; of given logits
# GIVEN_COLUMNS, block by block. On an H200 (T=8192, V=128256, torch 2.11, triton 3.6, 2026-12-01), as multiples of the
# time to read the logits: statistics of bf16 logits 1.28 with 1024 columns and 1 warp, 1.37 with 2 warps, 1.01 with 8
# such blocks to a program; of fp32 logits 0.97, 0.97 and 0.94. Gradients 1.08 to 1.10 of a copy with any of them.
BLOCK_COLUMNS = 1024
GIVEN_COLUMNS = 8 * BLOCK_COLUMNS
WARPS = 1
# The products are made outside the kernels, into a chunk of logits.
MAKES_PRODUCTS = False


def as_float(vector: Tensor | None, stand_in: Tensor) -> Tensor:
    """An optional vector as contiguous fp32; when it is absent, a pointer that is never followed."""
    return stand_in if vector is None else vector.float().contiguous()


def _ceil_divide(count: int, size: int) -> int:
    return -(-count // size)


def _power_of_2(least: int) -> int:
    return 1 << max(least - 1, 0).bit_length()


def _block(columns: int) -> int:
    return min(BLOCK_COLUMNS, _power_of_2(columns))


def transform_flags(bias: Tensor | None, class_weight: Tensor | None, transform: Transform) -> dict[str, Any]:
    """Which parts the transform has, as the kernels' constants."""
    number = NUMBER if transform.inverse_temperature != 1.0 else NONE
    return dict(
        HAS_BIAS=bias is not None, HAS_WEIGHT=class_weight is not None, HAS_SCALE=transform.logit_scale != 1.0,
        HAS_SOFTCAP=transform.softcap != 0.0, TEMPERATURE=number if transform.temperature is None else TENSOR,
    )  # fmt: skip


# Kinds of TEMPERATURE, as kernels.py names them.
NONE, NUMBER, TENSOR = range(3)

_compiled: dict[tuple, Any] = {}


def launch(
    kernel, grid: tuple[int, int, int], key: tuple, arguments: tuple, constants: dict[str, Any], warps=4, stages=3
) -> None:
    """Launch, by way of Triton's compiler the first time only: it specialises the arguments anew in every call, which
    takes the host longer than the launch, and a small call's kernels are shorter than either.

    The key holds all that the kernel is specialised on beside its constants: the dtype and alignment of pointers, and
    the integers that the kernels do not exempt.
    """
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
    key = (kernel, device, warps, stages, *key, *constants.values())
    compiled = _compiled.get(key)
    if compiled is None:
        # None again under the interpreter, which has nothing compiled.
        _compiled[key] = kernel[grid](*arguments, **constants, num_warps=warps, num_stages=stages)
    else:
        compiled[grid](*arguments, *constants.values())


def kind(tensor: Tensor | None) -> tuple | None:
    """What a kernel is specialised on of a pointer."""
    return None if tensor is None else (tensor.dtype, tensor.data_ptr() % 16 == 0)


class Statistics:
    """Fills the partials of a call, chunk by chunk."""

    def __init__(
        self,
        target: Tensor,  # [R] index into the vocabulary, IGNORED or INVALID
        transform: Transform,
        wanted: tuple[bool, bool, bool],
        overwrite: bool,  # z is scratch; this backend leaves it alone either way
    ):
        self.target, self.transform, self.wanted = target, transform, wanted
        self.temperature = as_float(transform.temperature, target)
        self.block_columns = BLOCK_COLUMNS if overwrite else GIVEN_COLUMNS

    def __call__(
        self,
        z: Tensor,  # [R, C] products of the chunk, or given logits
        bias: Tensor | None,  # [C]
        class_weight: Tensor | None,  # [C]
        offset: int,  # index of the chunk's first class in the vocabulary
        partials: Tensor,  # [blocks of the chunk, FIELDS, R], written where wanted
        cache: Tensor | None,  # [R, C], written with z - block maximum
    ) -> None:
        transform, (rows, columns) = self.transform, z.shape
        entropy, smooth, prediction = self.wanted
        arguments = (
            z, z.stride(0), z.stride(1), self.target, as_float(bias, z), as_float(class_weight, z), self.temperature,
            partials, z if cache is None else cache, 0 if cache is None else cache.stride(0), rows, columns, offset,
            transform.logit_scale, transform.softcap, transform.inverse_temperature,
        )  # fmt: skip
        block = _block(columns)
        constants = transform_flags(bias, class_weight, transform) | dict(
            HAS_CACHE=cache is not None, WANT_ENTROPY=entropy, WANT_SMOOTH=smooth, WANT_PREDICTION=prediction,
            BLOCK=block, STEPS=_ceil_divide(min(columns, self.block_columns), block),
        )  # fmt: skip
        kinds = kind(z), kind(bias), kind(class_weight), kind(cache)
        key = (*kinds, z.stride(), arguments[9], columns)
        launch(statistics_kernel, (rows, partials.shape[0], 1), key, arguments, constants, WARPS)


class Gradient:
    """Turns the logits of a call into gradients, chunk by chunk."""

    # Of the cache a program takes so many rows and so many blocks of columns, each those of a block maximum.
    cached_rows, cached_columns, cached_blocks = 1, BLOCK_COLUMNS, 1

    def __init__(
        self,
        target: Tensor,  # [R] index into the vocabulary, IGNORED or INVALID
        transform: Transform,
        residuals: Tensor,  # [4, R]
        coefficients: Tensor,  # [4, R]
        flags: tuple[bool, bool],  # the entropy's and the smooth part's gradient arrived
    ):
        self.target, self.transform, self.flags = target, transform, flags
        self.residuals, self.coefficients = residuals, coefficients
        self.temperature = as_float(transform.temperature, target)

    def __call__(
        self,
        z: Tensor,  # [R, C] products of the chunk, given logits, or the cached z - block maximum
        block_max: Tensor | None,  # [blocks of the chunk, R] when z comes from the cache
        bias: Tensor | None,  # [C]
        class_weight: Tensor | None,  # [C]
        offset: int,
        out: Tensor,  # [R, C], written; may lie over z
    ) -> None:
        transform, (rows, columns) = self.transform, z.shape
        rows_each, block, blocks = 1, _block(columns), 1
        if block_max is not None:
            rows_each, block, blocks = self.cached_rows, self.cached_columns, self.cached_blocks
        programs = 1 if out.data_ptr() == z.data_ptr() else _ceil_divide(columns, block * blocks)
        arguments = (
            z, z.stride(0), z.stride(1), z if block_max is None else block_max,
            0 if block_max is None else block_max.stride(0), self.target, as_float(bias, z), as_float(class_weight, z),
            self.temperature, self.residuals, self.coefficients, out, out.stride(0), programs, rows, columns, offset,
            transform.logit_scale, transform.softcap, transform.inverse_temperature,
        )  # fmt: skip
        constants = transform_flags(bias, class_weight, transform) | dict(
            HAS_CACHE=block_max is not None, WITH_ENTROPY=self.flags[0], WITH_SMOOTH=self.flags[1],
            ROWS=rows_each, BLOCK=block,
        )  # fmt: skip
        kinds = kind(z), kind(bias), kind(class_weight), kind(out)
        key = (*kinds, z.stride(), out.stride(0), columns)
        launch(gradient_kernel, (_ceil_divide(rows, rows_each) * programs, 1, 1), key, arguments, constants, WARPS)


def _to_host(tensor: Tensor) -> Callable[[], list]:
    """Start a copy to the host, and return a function that waits for it alone."""
    if not tensor.is_cuda:
        return tensor.tolist
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    copy.copy_(tensor, non_blocking=True)
    event = torch.cuda.Event()
    event.record()

    def read() -> list:
        event.synchronize()
        return copy.tolist()

    return read


# 8 rows of a partial are a sector of 32 bytes.
FINISH_BLOCKS, FINISH_ROWS = 128, 8
ROW_BLOCK = 256
INSPECT_BLOCK = 4096


def inspect(
    target: Tensor, temperature: Tensor | None, ignore_index: int, vocab_size: int, read: bool
) -> tuple[Tensor, Callable[[], tuple[int, int, int]]]:
    """Coded labels [T], and a function that waits for how many are ignored, how many invalid, and how many temperatures
    [T] are not positive, if they are to be `read`. It does not wait for what was launched since."""
    tokens = target.shape[0]
    coded = target.new_empty(tokens)
    programs = _ceil_divide(tokens, INSPECT_BLOCK)
    counted = target.new_empty(programs, 3)
    if tokens:
        labels = target.contiguous()
        arguments = labels, as_float(temperature, target), coded, counted, tokens, ignore_index, vocab_size
        constants = dict(HAS_TEMPERATURE=temperature is not None, BLOCK=INSPECT_BLOCK)
        key = (-(2**31) <= ignore_index < 2**31,)
        launch(inspect_kernel, (programs, 1, 1), key, arguments, constants)

    arrived = _to_host(counted) if read else None

    def counts() -> tuple[int, int, int]:
        assert arrived is not None
        ignored, invalid, cold = (sum(column) for column in zip(*arrived(), strict=True))
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
    blocks, _, rows = partials.shape
    if rows == 0:
        return eager.finish(partials, target, index, tokens, vocab_size, wanted)
    present = (True, wanted[0], True, wanted[1])
    make = partials.new_empty if index is None else partials.new_zeros
    floats = [make(tokens) if p else None for p in present]
    prediction = (target.new_empty(tokens) if index is None else target.new_full((tokens,), -1)) if wanted[2] else None
    residuals = partials.new_empty(4, rows)
    padded = min(FINISH_BLOCKS, _power_of_2(blocks))
    tile = FINISH_ROWS
    arguments = (
        partials, target, _or(index, target), *(_or(f, partials) for f in floats), _or(prediction, target), residuals,
        blocks, rows, vocab_size,
    )  # fmt: skip
    constants = dict(
        HAS_INDEX=index is not None, WANT_ENTROPY=wanted[0], WANT_SMOOTH=wanted[1], WANT_PREDICTION=wanted[2],
        BLOCKS=padded, ROWS=tile,
    )  # fmt: skip
    launch(finish_kernel, (_ceil_divide(rows, tile), 1, 1), (), arguments, constants)
    return [*floats, prediction], residuals


def coefficients(
    upstream: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None],  # [T] each
    target: Tensor,  # [R] coded
    index: Tensor | None,  # [R]
    residuals: Tensor,  # [4, R]
    vocab_size: int,
    transform: Transform,
) -> Tensor:  # [4, R]
    rows = target.shape[0]
    out = torch.empty_like(residuals)
    if rows:
        # Upstream gradients may be expanded scalars: the kernel reads unit strides.
        present = [g is not None for g in upstream]
        arguments = (
            *(target if g is None else g.contiguous() for g in upstream), target, _or(index, target),
            as_float(transform.temperature, target), residuals, out, rows, vocab_size,
            transform.logit_scale * transform.inverse_temperature,
        )  # fmt: skip
        constants = dict(
            HAS_LOGPROB=present[0], HAS_ENTROPY=present[1], HAS_LSE=present[2], HAS_SMOOTH=present[3],
            HAS_INDEX=index is not None, HAS_TEMPERATURE=transform.temperature is not None, BLOCK=ROW_BLOCK,
        )  # fmt: skip
        key = tuple(None if g is None else g.dtype for g in upstream)
        launch(coefficient_kernel, (_ceil_divide(rows, ROW_BLOCK), 1, 1), key, arguments, constants)
    return out


def _or(tensor: Tensor | None, stand_in: Tensor) -> Tensor:
    """A pointer that is never followed for a tensor that is absent."""
    return stand_in if tensor is None else tensor
