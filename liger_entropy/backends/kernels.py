"""The Triton kernels, nothing else: launches and their sizes are in triton.py, the formulas in ../equations.py.

All arithmetic is fp32, all offsets are 64-bit. A partial has the fields of ../equations.py in its order:
row maximum, normalizer, shifted sum, smooth sum, smooth weight, target logit, prediction.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tl_tanh(x):
    """tanh from exp; below 0.2 its series, where 1 - 2 / (e^2x + 1) would cancel (relative error under 4e-7)."""
    square = x * x
    series = x * (1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0 - square * (17.0 / 315.0))))
    return tl.where(tl.abs(x) < 0.2, series, 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0))


@triton.jit
def tl_logits(z_ptr, bias_ptr, column, mask, logit_scale, softcap, inverse_temperature,
              HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_SOFTCAP: tl.constexpr):  # fmt: skip
    """Logits at `column` of the products at `z_ptr` (equations.transform_); 0 where the mask is off."""
    z = tl.load(z_ptr, mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        z += tl.load(bias_ptr + column, mask=mask, other=0.0)
    if HAS_SCALE:
        z *= logit_scale
    if HAS_SOFTCAP:
        z = softcap * tl_tanh(z / softcap)
    return z * inverse_temperature


@triton.jit
def tl_inverse_temperature(temperature_ptr, row, inverse_temperature, HAS_TEMPERATURE: tl.constexpr):
    if HAS_TEMPERATURE:
        inverse_temperature = inverse_temperature / tl.load(temperature_ptr + row)
    return inverse_temperature


# What is not specialised on here must not need it, and what is must be in the key of its launch: see triton.py.
@triton.jit(
    do_not_specialize=["rows", "offset"],
    do_not_specialize_on_alignment=["target_ptr", "temperature_ptr", "partial_ptr"],
)
def statistics_kernel(
    z_ptr,  # [R, C] products or given logits
    z_row_stride,
    z_column_stride,
    target_ptr,  # [R] index into the vocabulary, -1 ignored, -2 invalid
    bias_ptr,  # [C] fp32
    class_weight_ptr,  # [C] fp32
    temperature_ptr,  # [R] fp32
    partial_ptr,  # [blocks, 7, R] fp32
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
    WANT_ENTROPY: tl.constexpr,
    WANT_SMOOTH: tl.constexpr,
    WANT_PREDICTION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The partial of one row and one block of BLOCK columns."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1).to(tl.int64)
    out = partial_ptr + block * 7 * rows + row
    target = tl.load(target_ptr + row)
    if target == -1:
        # Probability mass 1 at logit 0, so that no later step meets 0 / 0.
        for field in tl.static_range(7):
            tl.store(out + field * rows, 1.0 if field == 1 else 0.0)
    else:
        column = block * BLOCK + tl.arange(0, BLOCK)
        mask = column < columns
        z_row = z_ptr + row * z_row_stride
        scale = tl_inverse_temperature(temperature_ptr, row, inverse_temperature, HAS_TEMPERATURE)
        z = tl_logits(z_row + column * z_column_stride, bias_ptr, column, mask, logit_scale, softcap, scale,
                      HAS_BIAS, HAS_SCALE, HAS_SOFTCAP)  # fmt: skip
        z = tl.where(mask, z, float("-inf"))
        if WANT_PREDICTION:
            row_max, first = tl.max(z, axis=0, return_indices=True, return_indices_tie_break_left=True)
            tl.store(out + 6 * rows, (block * BLOCK + first + offset).to(tl.float32))
        else:
            row_max = tl.max(z, axis=0)
        t = z - tl.where(row_max == float("-inf"), 0.0, row_max)
        e = tl.exp(t)
        tl.store(out, row_max)
        tl.store(out + 1 * rows, tl.sum(e, axis=0))
        if WANT_ENTROPY:
            tl.store(out + 2 * rows, tl.sum(tl.where(t == float("-inf"), 0.0, e * t), axis=0))
        if WANT_SMOOTH:
            if HAS_WEIGHT:
                c = tl.load(class_weight_ptr + column, mask=mask, other=0.0)
                tl.store(out + 3 * rows, tl.sum(tl.where(c == 0.0, 0.0, c * t), axis=0))
                tl.store(out + 4 * rows, tl.sum(c, axis=0))
            else:
                tl.store(out + 3 * rows, tl.sum(tl.where(mask, t, 0.0), axis=0))
                tl.store(out + 4 * rows, tl.minimum(columns - block * BLOCK, BLOCK).to(tl.float32))
        local = target - offset
        if (local >= block * BLOCK) & (local < tl.minimum(columns, (block + 1) * BLOCK)):
            z_target = tl_logits(z_row + local * z_column_stride, bias_ptr, local, True, logit_scale, softcap, scale,
                                 HAS_BIAS, HAS_SCALE, HAS_SOFTCAP)  # fmt: skip
            tl.store(out + 5 * rows, z_target)
        else:
            tl.store(out + 5 * rows, 0.0)
        if HAS_CACHE:
            tl.store(cache_ptr + row * cache_row_stride + column, t.to(cache_ptr.dtype.element_ty), mask=mask)


@triton.jit(
    do_not_specialize=["block_max_stride", "rows", "offset"],
    do_not_specialize_on_alignment=[
        "block_max_ptr",
        "target_ptr",
        "temperature_ptr",
        "residual_ptr",
        "coefficient_ptr",
    ],
)
def gradient_kernel(
    z_ptr,  # [R, C] products, given logits, or the cached z - block maximum
    z_row_stride,
    z_column_stride,
    block_max_ptr,  # [blocks, R] fp32, with the cache
    block_max_stride,
    target_ptr,  # [R] index into the vocabulary
    bias_ptr,  # [C] fp32
    class_weight_ptr,  # [C] fp32
    temperature_ptr,  # [R] fp32
    residual_ptr,  # [4, R] fp32: row maximum, log d
    coefficient_ptr,  # [4, R] fp32: of p, of p log p, at the target, of c
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
    """dL/da of one row, program (row, i) taking blocks i, i + programs, ...

    To write over z, launch one program a row. Its blocks go in order, and block i of out ends before block i + 1 of z
    begins, since elements of out are no wider: only loads and stores of the same block need the barrier.
    """
    row = tl.program_id(0).to(tl.int64)
    p_coefficient = tl.load(coefficient_ptr + row)
    log_p_coefficient = tl.load(coefficient_ptr + rows + row)
    target_coefficient = tl.load(coefficient_ptr + 2 * rows + row)
    smooth_coefficient = tl.load(coefficient_ptr + 3 * rows + row)
    # One number that is 0 only if all four are; NaN is not 0.
    active = tl.abs(p_coefficient) + tl.abs(log_p_coefficient) + tl.abs(target_coefficient) + tl.abs(smooth_coefficient)
    local = tl.load(target_ptr + row) - offset
    row_max = tl.load(residual_ptr + row)
    log_norm = tl.load(residual_ptr + rows + row)
    scale = tl_inverse_temperature(temperature_ptr, row, inverse_temperature, HAS_TEMPERATURE)
    for start in range(tl.program_id(1) * BLOCK, columns, tl.num_programs(1) * BLOCK):
        column = (start + tl.arange(0, BLOCK)).to(tl.int64)
        mask = column < columns
        z_here = z_ptr + row * z_row_stride + column * z_column_stride
        if HAS_CACHE:
            block_max = tl.load(block_max_ptr + (start // BLOCK) * block_max_stride + row)
            t = tl.load(z_here, mask=mask, other=0.0).to(tl.float32)
            z = t + block_max
            t += block_max - row_max
        else:
            z = tl_logits(z_here, bias_ptr, column, mask, logit_scale, softcap, scale, HAS_BIAS, HAS_SCALE, HAS_SOFTCAP)
            t = z - row_max
        tl.debug_barrier()
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
        g += tl.where(column == local, target_coefficient, 0.0)
        if HAS_SOFTCAP:
            tanh = z / (softcap * scale)
            g *= 1.0 - tanh * tanh
        g = tl.where(active == 0.0, 0.0, g)
        tl.store(out_ptr + row * out_row_stride + column, g.to(out_ptr.dtype.element_ty), mask=mask)
