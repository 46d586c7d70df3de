"""Functionals with the names, argument order and defaults of Liger 0.8.5, and what its modules share with them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn._reduction import legacy_get_string

from .checks import check_is_given
from .losses import CrossEntropyOutput, LossOptions, fused_loss
from .planner import ComputeOptions, checked_options
from .token_statistics import Call


def liger_cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    softcap: float | None = None,
    return_z_loss: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    return_entropy_loss: bool = False,
    *,
    entropy_coef: float = 0.0,
    temperature: float | Tensor | None = 1.0,
    logit_scale: float = 1.0,
    process_group: Any = None,
    options: ComputeOptions | None = None,
    vocab_size: int | None = None,
) -> Tensor | CrossEntropyOutput:
    """Liger's ``liger_cross_entropy`` on logits ``[T, V]``; see :func:`liger_entropy.cross_entropy` for the meaning.

    size_average and reduce follow torch's deprecated rule when given.
    """
    if size_average is not None or reduce is not None:
        reduction = legacy_get_string(size_average, reduce)
    loss_options = LossOptions(
        reduction, label_smoothing, lse_square_scale, entropy_coef,
        return_entropy_loss, return_z_loss, return_token_accuracy, return_predicted_tokens,
    )  # fmt: skip
    call = Call(
        input, None, target, None, weight, ignore_index, softcap, logit_scale, temperature, process_group, vocab_size
    )
    return fused_loss(call, loss_options, None, options)


def liger_fused_linear_cross_entropy(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    ce_weight: Tensor | None = None,
    ignore_index: int = -100,
    lse_square_scale: float = 0.0,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    softcap: float | None = None,
    return_z_loss: bool = False,
    accum_dtype: torch.dtype | None = None,
    use_token_scaling: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    chunk_mem_const: int = 1,
    return_entropy_loss: bool = False,
    *,
    token_weight: Tensor | None = None,
    entropy_coef: float = 0.0,
    temperature: float | Tensor | None = 1.0,
    logit_scale: float = 1.0,
    process_group: Any = None,
    options: ComputeOptions | None = None,
    vocab_size: int | None = None,
    reduction_group: Any = None,
) -> Tensor | CrossEntropyOutput:
    """Liger's ``liger_fused_linear_cross_entropy``; see :func:`liger_entropy.linear_cross_entropy` for the meaning.

    use_token_scaling multiplies each token's CE and z-loss by its detached probability of the label, without changing
    what the mean divides by. accum_dtype is accepted; accumulation is always fp32. chunk_mem_const above 1 sets the
    chunk's budget to that many times ``T D`` fp32 numbers, Liger's unit, unless options say otherwise.
    """
    check_is_given("weight", weight)
    check_liger_arguments(accum_dtype, use_token_scaling, chunk_mem_const)
    loss_options = LossOptions(
        reduction, label_smoothing, lse_square_scale, entropy_coef,
        return_entropy_loss, return_z_loss, return_token_accuracy, return_predicted_tokens, use_token_scaling,
    )  # fmt: skip
    call = Call(
        input, weight, target, bias, ce_weight, ignore_index, softcap, logit_scale, temperature,
        process_group, vocab_size,
    )  # fmt: skip
    options = checked_options(options)
    if chunk_mem_const > 1 and options.chunk_bytes == "auto":
        options = replace(options, chunk_bytes=max(1, chunk_mem_const * input.numel() * 4))
    return fused_loss(call, loss_options, token_weight, options, reduction_group)


def check_liger_arguments(accum_dtype, use_token_scaling, chunk_mem_const=1) -> None:
    """Liger's own arguments that have no counterpart in the losses."""
    if accum_dtype is not None and not (isinstance(accum_dtype, torch.dtype) and accum_dtype.is_floating_point):
        raise TypeError(f"accum_dtype: expected None or a floating torch.dtype, got {accum_dtype!r}")
    if not isinstance(use_token_scaling, bool):
        raise TypeError(f"use_token_scaling: expected True or False, got {use_token_scaling!r}")
    if isinstance(chunk_mem_const, bool) or not isinstance(chunk_mem_const, int) or chunk_mem_const < 1:
        raise ValueError(f"chunk_mem_const: expected an integer >= 1, got {chunk_mem_const!r}")
