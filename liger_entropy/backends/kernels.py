"""The Triton kernels over logits, row by row, and the epilogues that they share with hopper_kernels.py. Launches and
their sizes are in triton.py, the formulas in ../equations.py.

All arithmetic is fp32, offsets of rows are 64-bit. A partial has the fields of ../equations.py in its order:
row maximum, normalizer, shifted sum, smooth sum, smooth weight, target logit, prediction.

Tiles are [R, C]; what belongs to rows is [R], what belongs to columns [C].
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
# e^t is 0 there, so a class of probability 0 gives 0 * LEAST and not 0 * -inf. NaN comes back by way of e^t.
LEAST = tl.constexpr(-1e4)
NONE, NUMBER, TENSOR = (tl.constexpr(i) for i in range(3))  # kinds of TEMPERATURE


@triton.jit
def tl_tanh(x):
    """tanh from exp; below 0.2 its series, where 1 - 2 / (e^2x + 1) would cancel (relative error under 4e-7)."""
    square = x * x
    series = x * (1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0 - square * (17.0 / 315.0))))
    return tl.where(tl.abs(x) < 0.2, series, 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0))


@triton.jit
def tl_scale(temperature_ptr, row, row_mask, inverse_temperature, TEMPERATURE: tl.constexpr):
    """1 / temperature of rows; not to be used where TEMPERATURE is NONE."""
    scale = tl.full(row.shape, 1.0, tl.float32) * inverse_temperature
    if TEMPERATURE == TENSOR:
        scale = scale / tl.load(temperature_ptr + row, mask=row_mask, other=1.0)
    return scale


@triton.jit
def tl_logits(z, bias_ptr, column, column_mask, logit_scale, softcap, scale,
              HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
              TEMPERATURE: tl.constexpr):  # fmt: skip
    """Logits from products z [R, C] (equations.transform_)."""
    if HAS_BIAS:
        z += tl.load(bias_ptr + column, mask=column_mask, other=0.0)[None, :]
    if HAS_SCALE:
        z *= logit_scale
    if HAS_SOFTCAP:
        z = softcap * tl_tanh(z / softcap)
    if TEMPERATURE != NONE:
        z *= scale[:, None]
    return z


@triton.jit
def tl_partial(z, class_weight_ptr, column, column_mask, first, RAGGED: tl.constexpr, HAS_WEIGHT: tl.constexpr,
               WANT_ENTROPY: tl.constexpr, WANT_SMOOTH: tl.constexpr, WANT_PREDICTION: tl.constexpr):  # fmt: skip
    """z - row maximum [R, C], and the fields [R] of a tile but the target's (equations.block_statistics). z is -inf
    where the mask is off, which is nowhere unless RAGGED; `first` is the tile's first index into the vocabulary."""
    row_max = tl.max(z, axis=1)
    shifted_sum, smooth_sum, prediction = row_max, row_max, row_max
    smooth_weight = 0.0
    if WANT_PREDICTION:
        place = tl.arange(0, z.shape[1])[None, :]
        prediction = tl.min(tl.where(z == row_max[:, None], place, z.shape[1] - 1), axis=1).to(tl.float32) + first
    t = z - tl.where(row_max == float("-inf"), 0.0, row_max)[:, None]
    e = tl.exp2(t * LOG2E)
    normalizer = tl.sum(e, axis=1)
    if WANT_ENTROPY:
        shifted_sum = tl.sum(e * tl.maximum(t, LEAST), axis=1)
    if WANT_SMOOTH:
        if HAS_WEIGHT:
            c = tl.load(class_weight_ptr + column, mask=column_mask, other=0.0)
            smooth_sum = tl.sum(tl.where((c == 0.0)[None, :], 0.0, c[None, :] * t), axis=1)
            smooth_weight = tl.sum(c, axis=0)
        else:
            smooth_sum = tl.sum(tl.where(column_mask[None, :], t, 0.0) if RAGGED else t, axis=1)
            smooth_weight = tl.sum(column_mask.to(tl.float32), axis=0)
    return t, row_max, normalizer, shifted_sum, smooth_sum, smooth_weight, prediction


@triton.jit
def tl_merge(row_max, normalizer, shifted_sum, smooth_sum, smooth_weight, prediction,
             next_max, next_normalizer, next_shifted, next_smooth, next_weight, next_prediction,
             WANT_ENTROPY: tl.constexpr, WANT_SMOOTH: tl.constexpr, WANT_PREDICTION: tl.constexpr):  # fmt: skip
    """The fields [R] of two blocks, the first of equals first (equations.merge)."""
    if WANT_PREDICTION:
        prediction = tl.where(next_max > row_max, next_prediction, prediction)
    new_max = tl.maximum(row_max, next_max)
    shift = tl.where(row_max == float("-inf"), 0.0, row_max - new_max)
    next_shift = tl.where(next_max == float("-inf"), 0.0, next_max - new_max)
    factor, next_factor = tl.exp2(shift * LOG2E), tl.exp2(next_shift * LOG2E)
    if WANT_ENTROPY:
        shifted_sum = factor * (shifted_sum + shift * normalizer)
        shifted_sum += next_factor * (next_shifted + next_shift * next_normalizer)
    if WANT_SMOOTH:
        smooth_sum += shift * smooth_weight + next_smooth + next_shift * next_weight
        smooth_weight += next_weight
    normalizer = factor * normalizer + next_factor * next_normalizer
    return new_max, normalizer, shifted_sum, smooth_sum, smooth_weight, prediction


@triton.jit
def tl_store_partial(partial_ptr, block, row, rows, row_mask, target, row_max, normalizer, shifted_sum, smooth_sum,
                     smooth_weight, target_logit, prediction, WANT_ENTROPY: tl.constexpr, WANT_SMOOTH: tl.constexpr,
                     WANT_PREDICTION: tl.constexpr):  # fmt: skip
    """The fields [R] of a block of the vocabulary. An ignored row has mass 1 at logit 0, so that no later step meets
    0 / 0."""
    kept = target != -1
    out = partial_ptr + (tl.zeros(row.shape, tl.int64) + block) * 7 * rows + row
    tl.store(out, tl.where(kept, row_max, 0.0), mask=row_mask)
    tl.store(out + 1 * rows, tl.where(kept, normalizer, 1.0), mask=row_mask)
    if WANT_ENTROPY:
        tl.store(out + 2 * rows, tl.where(kept, shifted_sum, 0.0), mask=row_mask)
    if WANT_SMOOTH:
        tl.store(out + 3 * rows, tl.where(kept, smooth_sum, 0.0), mask=row_mask)
        tl.store(out + 4 * rows, tl.where(kept, smooth_weight, 0.0), mask=row_mask)
    tl.store(out + 5 * rows, tl.where(kept, target_logit, 0.0), mask=row_mask)
    if WANT_PREDICTION:
        tl.store(out + 6 * rows, tl.where(kept, prediction, 0.0), mask=row_mask)


@triton.jit
def tl_coefficients(coefficient_ptr, row, rows, row_mask):
    """What rows multiply, of p, of p log p, at the target, of c [R], and a number that is 0 only if all four are; NaN
    is not 0."""
    p = tl.load(coefficient_ptr + row, mask=row_mask, other=0.0)
    log_p = tl.load(coefficient_ptr + rows + row, mask=row_mask, other=0.0)
    target = tl.load(coefficient_ptr + 2 * rows + row, mask=row_mask, other=0.0)
    smooth = tl.load(coefficient_ptr + 3 * rows + row, mask=row_mask, other=0.0)
    return p, log_p, target, smooth, tl.abs(p) + tl.abs(log_p) + tl.abs(target) + tl.abs(smooth)


@triton.jit
def tl_gradient(t, z, log_norm, local, p_coefficient, log_p_coefficient, target_coefficient, smooth_coefficient,
                active, class_weight_ptr, column, column_mask, softcap, scale, HAS_WEIGHT: tl.constexpr,
                HAS_SOFTCAP: tl.constexpr, TEMPERATURE: tl.constexpr, WITH_ENTROPY: tl.constexpr,
                WITH_SMOOTH: tl.constexpr):  # fmt: skip
    """dL/da [R, C] from t = z - row maximum (equations.block_gradient_, and the softcap's derivative). `local` [R] is
    the target's column in the tile, if it lies in it."""
    log_p = t - log_norm[:, None]
    p = tl.exp2(log_p * LOG2E)
    g = tl.zeros_like(p) + p_coefficient[:, None]
    if WITH_ENTROPY:
        g += tl.maximum(log_p, LEAST) * log_p_coefficient[:, None]
    g *= p
    if WITH_SMOOTH:
        if HAS_WEIGHT:
            c = tl.load(class_weight_ptr + column, mask=column_mask, other=0.0)
            g += smooth_coefficient[:, None] * c[None, :]
        else:
            g += smooth_coefficient[:, None]
    at_target = tl.arange(0, t.shape[1])[None, :] == local[:, None]
    g += tl.where(at_target, target_coefficient[:, None], 0.0)
    if HAS_SOFTCAP:
        cap = tl.zeros_like(log_norm) + softcap
        if TEMPERATURE != NONE:
            cap *= scale
        tanh = z / cap[:, None]
        g *= 1.0 - tanh * tanh
    return tl.where((active == 0.0)[:, None], 0.0, g)


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
    partial_ptr,  # [programs, 7, R] fp32
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
    TEMPERATURE: tl.constexpr,
    HAS_CACHE: tl.constexpr,
    WANT_ENTROPY: tl.constexpr,
    WANT_SMOOTH: tl.constexpr,
    WANT_PREDICTION: tl.constexpr,
    BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
):
    """The partial of one row and STEPS blocks of BLOCK columns; STEPS is 1 with a cache, which goes by the maximum."""
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    row_mask = row < rows
    target = tl.load(target_ptr + row)
    scale = tl_scale(temperature_ptr, row, row_mask, inverse_temperature, TEMPERATURE)
    z_row = z_ptr + row[:, None] * z_row_stride
    first = tl.program_id(1) * (BLOCK * STEPS)
    total_max = tl.full((1,), float("-inf"), tl.float32)
    total, total_shifted, total_smooth = tl.zeros_like(total_max), tl.zeros_like(total_max), tl.zeros_like(total_max)
    total_weight, best = tl.zeros_like(total_max), tl.zeros_like(total_max) + (first + offset)
    for step in range(STEPS):
        start = first + step * BLOCK
        column = start + tl.arange(0, BLOCK)
        mask = column < columns
        z = tl.load(z_row + column[None, :].to(tl.int64) * z_column_stride,
                    mask=mask[None, :] & (target != -1)[:, None], other=0.0).to(tl.float32)  # fmt: skip
        z = tl_logits(z, bias_ptr, column, mask, logit_scale, softcap, scale,
                      HAS_BIAS, HAS_SCALE, HAS_SOFTCAP, TEMPERATURE)  # fmt: skip
        z = tl.where(mask[None, :], z, float("-inf"))
        t, row_max, normalizer, shifted_sum, smooth_sum, smooth_weight, prediction = tl_partial(
            z, class_weight_ptr, column, mask, start + offset,
            True, HAS_WEIGHT, WANT_ENTROPY, WANT_SMOOTH, WANT_PREDICTION,
        )  # fmt: skip
        if HAS_CACHE:
            cached = t.to(cache_ptr.dtype.element_ty)
            tl.store(cache_ptr + row[:, None] * cache_row_stride + column[None, :], cached, mask=mask[None, :])
        total_max, total, total_shifted, total_smooth, total_weight, best = tl_merge(
            total_max, total, total_shifted, total_smooth, total_weight, best,
            row_max, normalizer, shifted_sum, smooth_sum, smooth_weight, prediction,
            WANT_ENTROPY, WANT_SMOOTH, WANT_PREDICTION,
        )  # fmt: skip
    local = target - offset
    here = (local >= first) & (local < tl.minimum(columns, first + BLOCK * STEPS))
    z_target = tl.load(z_ptr + row * z_row_stride + local * z_column_stride, mask=here, other=0.0).to(tl.float32)
    z_target = tl_logits(z_target[:, None], bias_ptr, local, here, logit_scale, softcap, scale,
                         HAS_BIAS, HAS_SCALE, HAS_SOFTCAP, TEMPERATURE)  # fmt: skip
    target_logit = tl.where(here, tl.sum(z_target, axis=1), 0.0)
    tl_store_partial(partial_ptr, tl.program_id(1), row, rows, row_mask, target, total_max, total, total_shifted,
                     total_smooth, total_weight, target_logit, best,
                     WANT_ENTROPY, WANT_SMOOTH, WANT_PREDICTION)  # fmt: skip


@triton.jit(
    do_not_specialize=["block_max_stride", "programs", "rows", "offset"],
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
    block_max_ptr,  # [blocks, R] fp32, with the cache, whose blocks are BLOCK columns
    block_max_stride,
    target_ptr,  # [R] index into the vocabulary
    bias_ptr,  # [C] fp32
    class_weight_ptr,  # [C] fp32
    temperature_ptr,  # [R] fp32
    residual_ptr,  # [4, R] fp32: row maximum, log d
    coefficient_ptr,  # [4, R] fp32
    out_ptr,  # [R, C]; may lie over z, its rows at the same addresses, its elements no wider than z's
    out_row_stride,
    programs,  # of the same rows
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
    TEMPERATURE: tl.constexpr,
    HAS_CACHE: tl.constexpr,
    WITH_ENTROPY: tl.constexpr,
    WITH_SMOOTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """dL/da of ROWS rows. Of the `programs` that share them the i-th takes blocks i, i + programs, ...; they come one
    after the other in the grid and so read one stretch of memory at a time.

    To write over z, launch one program a row. Its blocks go in order, and block i of out ends before block i + 1 of z
    begins, since elements of out are no wider: only loads and stores of the same block need the barrier.
    """
    row = (tl.program_id(0) // programs).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row_mask = row < rows
    p_coefficient, log_p_coefficient, target_coefficient, smooth_coefficient, active = tl_coefficients(
        coefficient_ptr, row, rows, row_mask
    )
    local = tl.load(target_ptr + row, mask=row_mask, other=-1) - offset
    row_max = tl.load(residual_ptr + row, mask=row_mask, other=0.0)
    log_norm = tl.load(residual_ptr + rows + row, mask=row_mask, other=0.0)
    scale = tl_scale(temperature_ptr, row, row_mask, inverse_temperature, TEMPERATURE)
    for start in range(tl.program_id(0) % programs * BLOCK, columns, programs * BLOCK):
        column = start + tl.arange(0, BLOCK)
        column_mask = column < columns
        mask = row_mask[:, None] & column_mask[None, :]
        z_here = z_ptr + row[:, None] * z_row_stride + column[None, :].to(tl.int64) * z_column_stride
        z = tl.load(z_here, mask=mask & (active != 0.0)[:, None], other=0.0).to(tl.float32)
        if HAS_CACHE:
            block = tl.zeros(row.shape, tl.int64) + start // BLOCK
            block_max = tl.load(block_max_ptr + block * block_max_stride + row, mask=row_mask, other=0.0)
            t = z + (block_max - row_max)[:, None]
            z += block_max[:, None]
        else:
            z = tl_logits(z, bias_ptr, column, column_mask, logit_scale, softcap, scale,
                          HAS_BIAS, HAS_SCALE, HAS_SOFTCAP, TEMPERATURE)  # fmt: skip
            t = z - row_max[:, None]
        tl.debug_barrier()
        g = tl_gradient(t, z, log_norm, local - start, p_coefficient, log_p_coefficient,
                        target_coefficient, smooth_coefficient, active, class_weight_ptr, column, column_mask,
                        softcap, scale, HAS_WEIGHT, HAS_SOFTCAP, TEMPERATURE, WITH_ENTROPY, WITH_SMOOTH)  # fmt: skip
        tl.store(out_ptr + row[:, None] * out_row_stride + column[None, :], g.to(out_ptr.dtype.element_ty), mask=mask)
