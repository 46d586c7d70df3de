"""Triton kernels that make a tile of logits on the tensor cores and use it up where it was made.

Both are persistent: a program takes every `tl.num_programs(0)`-th tile of x w^T, [BLOCK_ROWS, BLOCK_COLUMNS] each,
through TMA descriptors, in one flat loop over the tiles and the depth of their products. What follows the product is
shared with kernels.py; it has no branches, around which the loop is pipelined worse (20 % longer on an H200).
"""

from __future__ import annotations

import triton
import triton.language as tl

from .kernels import tl_coefficients, tl_gradient, tl_logits, tl_partial, tl_scale, tl_store_partial

# Row tiles that meet a tile of the weight one after the other, while it is in L2.
GROUP = tl.constexpr(8)


@triton.jit
def tl_tile(tile, row_tiles, column_tiles):
    """Row and column of a tile: GROUP row tiles at a time, row by row within a column."""
    width = GROUP * column_tiles
    first = tile // width * GROUP
    size = tl.minimum(row_tiles - first, GROUP)
    inside = tile % width
    return first + inside % size, inside // size


@triton.jit
def tl_store_halves(desc, row, column, values):
    """Write values [R, C] at a row and a column, in two halves: the room that TMA reads them from is half as large."""
    pair = tl.reshape(values.to(desc.dtype), (values.shape[0], 2, values.shape[1] // 2))
    left, right = tl.split(tl.permute(pair, (0, 2, 1)))
    desc.store([row, column], left)
    desc.store([row, column + values.shape[1] // 2], right)


@triton.jit(do_not_specialize=["rows", "columns", "offset"], do_not_specialize_on_alignment=[
    "target_ptr", "temperature_ptr", "partial_ptr", "bias_ptr", "class_weight_ptr"
])  # fmt: skip
def product_statistics_kernel(
    x_desc,  # [R, D] half
    w_desc,  # [C, D] half
    cache_desc,  # [R, C] half, with a cache
    target_ptr,  # [R] index into the vocabulary, -1 ignored, -2 invalid
    bias_ptr,  # [C] fp32
    class_weight_ptr,  # [C] fp32
    temperature_ptr,  # [R] fp32
    partial_ptr,  # [column tiles, 7, R] fp32
    rows,
    columns,
    depth,
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
    RAGGED: tl.constexpr,  # columns is not a multiple of BLOCK_COLUMNS
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
):
    """The partials of the logits of x w^T, and their cache."""
    row_tiles, column_tiles = tl.cdiv(rows, BLOCK_ROWS), tl.cdiv(columns, BLOCK_COLUMNS)
    for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0), flatten=True):
        row_tile, column_tile = tl_tile(tile, row_tiles, column_tiles)
        z = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), dtype=tl.float32)
        for k in range(tl.cdiv(depth, BLOCK_DEPTH)):
            x = x_desc.load([row_tile * BLOCK_ROWS, k * BLOCK_DEPTH])
            w = w_desc.load([column_tile * BLOCK_COLUMNS, k * BLOCK_DEPTH])
            z = tl.dot(x, w.T, z)
        row = row_tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        column = column_tile * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
        row_mask, column_mask = row < rows, column < columns
        target = tl.load(target_ptr + row, mask=row_mask, other=-1)
        scale = tl_scale(temperature_ptr, row, row_mask, inverse_temperature, TEMPERATURE)
        z = tl_logits(z, bias_ptr, column, column_mask, logit_scale, softcap, scale,
                      HAS_BIAS, HAS_SCALE, HAS_SOFTCAP, TEMPERATURE)  # fmt: skip
        local = target.to(tl.int32) - (offset + column_tile * BLOCK_COLUMNS)
        at_target = tl.arange(0, BLOCK_COLUMNS)[None, :] == local[:, None]
        # Before the mask: padding has the logit 0 of zeros read, and the label may lie there, in the next rank's shard.
        target_logit = tl.sum(tl.where(at_target, z, 0.0), axis=1)
        if RAGGED:
            z = tl.where(column_mask[None, :], z, float("-inf"))
        t, row_max, normalizer, shifted_sum, smooth_sum, smooth_weight, prediction = tl_partial(
            z, class_weight_ptr, column, column_mask, column_tile * BLOCK_COLUMNS + offset,
            RAGGED, HAS_WEIGHT, WANT_ENTROPY, WANT_SMOOTH, WANT_PREDICTION,
        )  # fmt: skip
        tl_store_partial(partial_ptr, column_tile, row, rows, row_mask, target, row_max, normalizer, shifted_sum,
                         smooth_sum, smooth_weight, target_logit, prediction,
                         WANT_ENTROPY, WANT_SMOOTH, WANT_PREDICTION)  # fmt: skip
        if HAS_CACHE:
            tl_store_halves(cache_desc, row_tile * BLOCK_ROWS, column_tile * BLOCK_COLUMNS, t)


@triton.jit(do_not_specialize=["rows", "columns", "offset"], do_not_specialize_on_alignment=[
    "target_ptr", "temperature_ptr", "residual_ptr", "coefficient_ptr", "bias_ptr", "class_weight_ptr"
])  # fmt: skip
def product_gradient_kernel(
    x_desc,  # [R, D] half
    w_desc,  # [C, D] half
    out_desc,  # [R, C] half
    target_ptr,  # [R] index into the vocabulary
    bias_ptr,  # [C] fp32
    class_weight_ptr,  # [C] fp32
    temperature_ptr,  # [R] fp32
    residual_ptr,  # [4, R] fp32: row maximum, log d
    coefficient_ptr,  # [4, R] fp32
    rows,
    columns,
    depth,
    offset,
    logit_scale,
    softcap,
    inverse_temperature,
    HAS_BIAS: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    TEMPERATURE: tl.constexpr,
    WITH_ENTROPY: tl.constexpr,
    WITH_SMOOTH: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
):
    """dL/da of the logits of x w^T."""
    row_tiles, column_tiles = tl.cdiv(rows, BLOCK_ROWS), tl.cdiv(columns, BLOCK_COLUMNS)
    for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0), flatten=True):
        row_tile, column_tile = tl_tile(tile, row_tiles, column_tiles)
        z = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), dtype=tl.float32)
        for k in range(tl.cdiv(depth, BLOCK_DEPTH)):
            x = x_desc.load([row_tile * BLOCK_ROWS, k * BLOCK_DEPTH])
            w = w_desc.load([column_tile * BLOCK_COLUMNS, k * BLOCK_DEPTH])
            z = tl.dot(x, w.T, z)
        row = row_tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        column = column_tile * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
        row_mask, column_mask = row < rows, column < columns
        p_coefficient, log_p_coefficient, target_coefficient, smooth_coefficient, active = tl_coefficients(
            coefficient_ptr, row, rows, row_mask
        )
        target = tl.load(target_ptr + row, mask=row_mask, other=-1).to(tl.int32)
        row_max = tl.load(residual_ptr + row, mask=row_mask, other=0.0)
        log_norm = tl.load(residual_ptr + rows + row, mask=row_mask, other=0.0)
        scale = tl_scale(temperature_ptr, row, row_mask, inverse_temperature, TEMPERATURE)
        z = tl_logits(z, bias_ptr, column, column_mask, logit_scale, softcap, scale,
                      HAS_BIAS, HAS_SCALE, HAS_SOFTCAP, TEMPERATURE)  # fmt: skip
        g = tl_gradient(z - row_max[:, None], z, log_norm, target - (offset + column_tile * BLOCK_COLUMNS),
                        p_coefficient, log_p_coefficient, target_coefficient, smooth_coefficient, active,
                        class_weight_ptr, column, column_mask, softcap, scale,
                        HAS_WEIGHT, HAS_SOFTCAP, TEMPERATURE, WITH_ENTROPY, WITH_SMOOTH)  # fmt: skip
        tl_store_halves(out_desc, row_tile * BLOCK_ROWS, column_tile * BLOCK_COLUMNS, g)
