"""Triton kernels on per-row vectors: one launch each where plain torch takes 5 to 40. Formulas in ../equations.py."""

from __future__ import annotations

import inspect

import triton
import triton.language as tl

from .kernels import tl_merge


def _row_kernel(function):
    """A kernel that is compiled once for each set of constants and dtypes, whatever its numbers and alignments."""
    names = [n for n, p in inspect.signature(function).parameters.items() if p.annotation is inspect.Parameter.empty]
    return triton.jit(function, do_not_specialize=names, do_not_specialize_on_alignment=names)


@_row_kernel
def inspect_kernel(
    target_ptr,  # [T] labels
    temperature_ptr,  # [T] fp32
    out_ptr,  # [T]
    count_ptr,  # [programs, 3] ignored, invalid, temperatures that are not positive
    tokens,
    ignore_index,
    vocab_size,
    HAS_TEMPERATURE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """equations.coded, and what there is to check."""
    program = tl.program_id(0).to(tl.int64)
    token = program * BLOCK + tl.arange(0, BLOCK)
    mask = token < tokens
    target = tl.load(target_ptr + token, mask=mask, other=0)
    ignored = (target == ignore_index) & mask
    invalid = ((target < 0) | (target >= vocab_size)) & (target != ignore_index) & mask
    tl.store(out_ptr + token, tl.where(ignored, -1, tl.where(invalid, -2, target)), mask=mask)
    tl.store(count_ptr + program * 3, tl.sum(ignored.to(tl.int64), axis=0))
    tl.store(count_ptr + program * 3 + 1, tl.sum(invalid.to(tl.int64), axis=0))
    cold = 0
    if HAS_TEMPERATURE:
        temperature = tl.load(temperature_ptr + token, mask=mask, other=1.0)
        cold = tl.sum(tl.where((temperature > 0.0) & (temperature < float("inf")), 0, 1).to(tl.int64), axis=0)
    tl.store(count_ptr + program * 3 + 2, cold)


@triton.jit
def tl_store_statistic(out_ptr, token, value, target, mask):
    """0 at ignored rows, NaN at invalid ones."""
    value = tl.where(target == -2, float("nan"), value)
    tl.store(out_ptr + token, tl.where(target == -1, 0.0, value), mask=mask)


@triton.jit
def tl_merged_tile(here, rows, mask, WANT_ENTROPY: tl.constexpr, WANT_SMOOTH: tl.constexpr,
                   WANT_PREDICTION: tl.constexpr):  # fmt: skip
    """The fields [ROWS] of the partials at `here` [BLOCKS, ROWS] (equations.merge), but the target's."""
    block_max = tl.load(here, mask=mask, other=float("-inf"))
    row_max = tl.max(block_max, axis=0)
    shift = tl.where(block_max == float("-inf"), 0.0, block_max - row_max[None, :])
    scale = tl.exp(shift)
    norm = tl.load(here + 1 * rows, mask=mask, other=0.0)
    shifted, smooth, weight, index = row_max, row_max, row_max, row_max
    if WANT_ENTROPY:
        shifted = tl.load(here + 2 * rows, mask=mask, other=0.0)
        shifted = tl.sum(scale * (shifted + shift * norm), axis=0)
    if WANT_SMOOTH:
        weights = tl.load(here + 4 * rows, mask=mask, other=0.0)
        smooth = tl.sum(tl.load(here + 3 * rows, mask=mask, other=0.0) + shift * weights, axis=0)
        weight = tl.sum(weights, axis=0)
    if WANT_PREDICTION:
        place = tl.arange(0, here.shape[0])[:, None]
        first = tl.min(tl.where(block_max == row_max[None, :], place, here.shape[0] - 1), axis=0)
        index = tl.load(here + 6 * rows, mask=mask, other=0.0)
        index = tl.sum(tl.where(place == first[None, :], index, 0.0), axis=0)
    return row_max, tl.sum(scale * norm, axis=0), shifted, smooth, weight, index


@_row_kernel
def finish_kernel(
    partial_ptr,  # [blocks, 7, R]
    target_ptr,  # [R] coded
    index_ptr,  # [R]
    logprob_ptr,  # [T] each
    entropy_ptr,
    lse_ptr,
    smooth_ptr,
    prediction_ptr,
    residual_ptr,  # [4, R]
    blocks,
    rows,
    vocab_size,
    HAS_INDEX: tl.constexpr,
    WANT_ENTROPY: tl.constexpr,
    WANT_SMOOTH: tl.constexpr,
    WANT_PREDICTION: tl.constexpr,
    BLOCKS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """equations.merge, then equations.finalize, for ROWS rows; BLOCKS partials at a time."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    in_rows = row < rows
    row_max = tl.full((ROWS,), float("-inf"), tl.float32)
    norm, shifted, smooth = tl.zeros_like(row_max), tl.zeros_like(row_max), tl.zeros_like(row_max)
    weight, index, target_logit = tl.zeros_like(row_max), tl.zeros_like(row_max), tl.zeros_like(row_max)
    for start in range(0, blocks, BLOCKS):
        block = start + tl.arange(0, BLOCKS)
        here = partial_ptr + block[:, None].to(tl.int64) * 7 * rows + row[None, :]  # [BLOCKS, ROWS]
        mask = (block < blocks)[:, None] & in_rows[None, :]
        tile_max, tile_norm, tile_shifted, tile_smooth, tile_weight, tile_index = tl_merged_tile(
            here, rows, mask, WANT_ENTROPY, WANT_SMOOTH, WANT_PREDICTION
        )
        target_logit += tl.sum(tl.load(here + 5 * rows, mask=mask, other=0.0), axis=0)
        row_max, norm, shifted, smooth, weight, index = tl_merge(
            row_max, norm, shifted, smooth, weight, index,
            tile_max, tile_norm, tile_shifted, tile_smooth, tile_weight, tile_index,
            WANT_ENTROPY, WANT_SMOOTH, WANT_PREDICTION,
        )  # fmt: skip
    log_norm = tl.log(norm)
    target = tl.load(target_ptr + row, mask=in_rows, other=-1)
    token = row
    if HAS_INDEX:
        token = tl.load(index_ptr + row, mask=in_rows, other=0)
    tl_store_statistic(logprob_ptr, token, (target_logit - row_max) - log_norm, target, in_rows)
    tl_store_statistic(lse_ptr, token, row_max + log_norm, target, in_rows)
    tl.store(residual_ptr + row, row_max, mask=in_rows)
    tl.store(residual_ptr + rows + row, log_norm, mask=in_rows)
    shifted_mean, mean_weight = tl.zeros_like(norm), tl.zeros_like(norm)
    if WANT_ENTROPY:
        shifted_mean = shifted / norm
        tl_store_statistic(entropy_ptr, token, log_norm - shifted_mean, target, in_rows)
    if WANT_SMOOTH:
        mean_weight = weight / vocab_size
        tl_store_statistic(smooth_ptr, token, smooth / vocab_size - mean_weight * log_norm, target, in_rows)
    tl.store(residual_ptr + 2 * rows + row, shifted_mean, mask=in_rows)
    tl.store(residual_ptr + 3 * rows + row, mean_weight, mask=in_rows)
    if WANT_PREDICTION:
        tl.store(prediction_ptr + token, tl.where(target == -1, -1, index.to(tl.int64)), mask=in_rows)


@triton.jit
def tl_upstream(ptr, token, mask, PRESENT: tl.constexpr):
    if PRESENT:
        return tl.load(ptr + token, mask=mask, other=0.0).to(tl.float32)
    else:
        return tl.zeros_like(token).to(tl.float32)


@_row_kernel
def coefficient_kernel(
    g_logprob_ptr,  # [T] each
    g_entropy_ptr,
    g_lse_ptr,
    g_smooth_ptr,
    target_ptr,  # [R] coded
    index_ptr,  # [R]
    temperature_ptr,  # [R]
    residual_ptr,  # [4, R]
    out_ptr,  # [4, R]
    rows,
    vocab_size,
    scale,  # logit_scale / temperature
    HAS_LOGPROB: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    HAS_LSE: tl.constexpr,
    HAS_SMOOTH: tl.constexpr,
    HAS_INDEX: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """equations.row_coefficients."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = row < rows
    token = row
    if HAS_INDEX:
        token = tl.load(index_ptr + row, mask=mask, other=0)
    g_logprob = tl_upstream(g_logprob_ptr, token, mask, HAS_LOGPROB)
    g_entropy = tl_upstream(g_entropy_ptr, token, mask, HAS_ENTROPY)
    g_smooth = tl_upstream(g_smooth_ptr, token, mask, HAS_SMOOTH)
    log_norm = tl.load(residual_ptr + rows + row, mask=mask, other=0.0)
    shifted_mean = tl.load(residual_ptr + 2 * rows + row, mask=mask, other=0.0)
    mean_weight = tl.load(residual_ptr + 3 * rows + row, mask=mask, other=0.0)
    p = tl_upstream(g_lse_ptr, token, mask, HAS_LSE) - g_logprob
    p -= tl.where(g_smooth == 0.0, 0.0, g_smooth * mean_weight)
    p -= tl.where(g_entropy == 0.0, 0.0, g_entropy * (log_norm - shifted_mean))
    if HAS_TEMPERATURE:
        scale = scale / tl.load(temperature_ptr + row, mask=mask, other=1.0)
    target = tl.load(target_ptr + row, mask=mask, other=-1)
    scale = tl.where(target == -2, float("nan"), scale)
    kept = target != -1
    tl.store(out_ptr + row, tl.where(kept, p * scale, 0.0), mask=mask)
    tl.store(out_ptr + rows + row, tl.where(kept, -g_entropy * scale, 0.0), mask=mask)
    tl.store(out_ptr + 2 * rows + row, tl.where(kept, g_logprob * scale, 0.0), mask=mask)
    tl.store(out_ptr + 3 * rows + row, tl.where(kept, g_smooth / vocab_size * scale, 0.0), mask=mask)
