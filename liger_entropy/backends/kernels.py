"""The Triton kernels, nothing else: launches and their sizes are in triton.py, the formulas in ../equations.py.

One program handles one row. All arithmetic is fp32, all offsets are 64-bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

# The layout of a partial, of the residuals and of the row coefficients, as in ../equations.py.
ROW_MAX = tl.constexpr(0)
NORMALIZER = tl.constexpr(1)
SHIFTED_SUM = tl.constexpr(2)
SMOOTH_SUM = tl.constexpr(3)
SMOOTH_WEIGHT = tl.constexpr(4)
TARGET_LOGIT = tl.constexpr(5)
PREDICTION = tl.constexpr(6)
FIELDS = tl.constexpr(7)
PROBABILITY = tl.constexpr(0)
LOG_PROBABILITY = tl.constexpr(1)
TARGET = tl.constexpr(2)
SMOOTH = tl.constexpr(3)
IGNORED = tl.constexpr(-1)


@triton.jit
def tl_tanh(x):
    """tanh from exp; below 0.2 its series, where 1 - 2 / (e^2x + 1) would cancel (relative error under 4e-7)."""
    square = x * x
    series = x * (1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0 - square * (17.0 / 315.0))))
    return tl.where(tl.abs(x) < 0.2, series, 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0))


@triton.jit
def tl_transform(z, bias_ptr, columns, mask, logit_scale, softcap, inverse_temperature,
                 HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_SOFTCAP: tl.constexpr):  # fmt: skip
    """Logits of the products z [BLOCK], -inf where the mask is off."""
    if HAS_BIAS:
        z += tl.load(bias_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    if HAS_SCALE:
        z *= logit_scale
    if HAS_SOFTCAP:
        z = softcap * tl_tanh(z / softcap)
    return tl.where(mask, z * inverse_temperature, float("-inf"))


@triton.jit
def tl_row_inverse_temperature(temperature_ptr, row, inverse_temperature, HAS_TEMPERATURE: tl.constexpr):
    if HAS_TEMPERATURE:
        inverse_temperature = inverse_temperature / tl.load(temperature_ptr + row)
    return inverse_temperature


@triton.jit
def statistics_kernel(
    z_ptr,  # [R, C] products or given logits
    z_row_stride,
    z_column_stride,
    target_ptr,  # [R] index into the vocabulary, IGNORED, or INVALID
    bias_ptr,  # [C] fp32
    class_weight_ptr,  # [C] fp32
    temperature_ptr,  # [R] fp32
    partial_ptr,  # [blocks, FIELDS, R] fp32
    cache_ptr,  # [R, C]
    cache_row_stride,
    rows,
    columns,
    offset,  # index of the chunk's first class in the vocabulary
    logit_scale,
    softcap,
    inverse_temperature,
    HAS_BIAS: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
    HAS_CACHE: tl.constexpr,
    WANT_SMOOTH: tl.constexpr,
    WANT_PREDICTION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The partial of one row and one block of BLOCK columns."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1).to(tl.int64)
    out = partial_ptr + block * FIELDS * rows + row
    target = tl.load(target_ptr + row)
    if target == IGNORED:
        # A neutral partial: probability mass 1 at logit 0, so that no later step meets 0 / 0.
        for field in tl.static_range(7):
            tl.store(out + field * rows, 1.0 if field == 1 else 0.0)
    else:
        column = block * BLOCK + tl.arange(0, BLOCK)
        mask = column < columns
        z = tl.load(z_ptr + row * z_row_stride + column * z_column_stride, mask=mask, other=0.0).to(tl.float32)
        scale = tl_row_inverse_temperature(temperature_ptr, row, inverse_temperature, HAS_TEMPERATURE)
        z = tl_transform(z, bias_ptr, column, mask, logit_scale, softcap, scale, HAS_BIAS, HAS_SCALE, HAS_SOFTCAP)

        row_max = tl.max(z, axis=0)
        t = z - tl.where(row_max == float("-inf"), 0.0, row_max)
        e = tl.exp(t)
        tl.store(out + ROW_MAX * rows, row_max)
        tl.store(out + NORMALIZER * rows, tl.sum(e, axis=0))
        tl.store(out + SHIFTED_SUM * rows, tl.sum(tl.where(t == float("-inf"), 0.0, e * t), axis=0))
        here = (column + offset == target) & mask
        tl.store(out + TARGET_LOGIT * rows, tl.sum(tl.where(here, z, 0.0), axis=0))
        if WANT_SMOOTH:
            c = tl.where(mask, 1.0, 0.0)
            if HAS_WEIGHT:
                c = tl.load(class_weight_ptr + column, mask=mask, other=0.0)
            tl.store(out + SMOOTH_SUM * rows, tl.sum(tl.where(c == 0.0, 0.0, c * t), axis=0))
            tl.store(out + SMOOTH_WEIGHT * rows, tl.sum(c, axis=0))
        if WANT_PREDICTION:
            first = tl.min(tl.where((z == row_max) & mask, column, columns), axis=0)
            tl.store(out + PREDICTION * rows, (first + offset).to(tl.float32))
        if HAS_CACHE:
            tl.store(cache_ptr + row * cache_row_stride + column, t.to(cache_ptr.dtype.element_ty), mask=mask)


@triton.jit
def gradient_kernel(
    z_ptr,  # [R, C] products, given logits, or the cached z - block maximum
    z_row_stride,
    z_column_stride,
    block_max_ptr,  # [blocks, R] fp32, with the cache
    target_ptr,  # [R] index into the vocabulary
    bias_ptr,  # [C] fp32
    class_weight_ptr,  # [C] fp32
    temperature_ptr,  # [R] fp32
    residual_ptr,  # [4, R] fp32: row maximum, log d
    coefficient_ptr,  # [4, R] fp32
    out_ptr,  # [R, C]; may lie over z, its rows at the same addresses, its elements no wider than z's
    out_row_stride,
    rows,
    columns,
    offset,
    logit_scale,
    softcap,
    inverse_temperature,
    HAS_BIAS: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
    HAS_CACHE: tl.constexpr,
    WITH_ENTROPY: tl.constexpr,
    WITH_SMOOTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """dL/da of one row. Its blocks go in order and the stores of block i end before the loads of block i + 1 begin
    in memory (elements of out are no wider), so only a barrier inside the block is needed to write over z."""
    row = tl.program_id(0).to(tl.int64)
    p_coefficient = tl.load(coefficient_ptr + PROBABILITY * rows + row)
    log_p_coefficient = tl.load(coefficient_ptr + LOG_PROBABILITY * rows + row)
    target_coefficient = tl.load(coefficient_ptr + TARGET * rows + row)
    smooth_coefficient = tl.load(coefficient_ptr + SMOOTH * rows + row)
    # One number that is 0 only if all four are; NaN is not 0.
    active = tl.abs(p_coefficient) + tl.abs(log_p_coefficient) + tl.abs(target_coefficient) + tl.abs(smooth_coefficient)
    target = tl.load(target_ptr + row)
    row_max = tl.load(residual_ptr + row)
    log_norm = tl.load(residual_ptr + rows + row)
    scale = tl_row_inverse_temperature(temperature_ptr, row, inverse_temperature, HAS_TEMPERATURE)
    for start in range(0, columns, BLOCK):
        column = (start + tl.arange(0, BLOCK)).to(tl.int64)
        mask = column < columns
        z = tl.load(z_ptr + row * z_row_stride + column * z_column_stride, mask=mask, other=0.0).to(tl.float32)
        tl.debug_barrier()
        if HAS_CACHE:
            block_max = tl.load(block_max_ptr + (start // BLOCK) * rows + row)
            t = z + (block_max - row_max)
            z += block_max
        else:
            z = tl_transform(z, bias_ptr, column, mask, logit_scale, softcap, scale, HAS_BIAS, HAS_SCALE, HAS_SOFTCAP)
            t = z - row_max
        log_p = t - log_norm
        p = tl.exp(log_p)
        g = p * p_coefficient
        if WITH_ENTROPY:
            g += tl.where(p == 0.0, 0.0, p * log_p * log_p_coefficient)
        if WITH_SMOOTH:
            c = 1.0
            if HAS_WEIGHT:
                c = tl.load(class_weight_ptr + column, mask=mask, other=0.0)
            g += smooth_coefficient * c
        g += tl.where(column + offset == target, target_coefficient, 0.0)
        if HAS_SOFTCAP:
            tanh = z / (softcap * scale)
            g *= 1.0 - tanh * tanh
        g = tl.where(active == 0.0, 0.0, g)
        tl.store(out_ptr + row * out_row_stride + column, g.to(out_ptr.dtype.element_ty), mask=mask)
