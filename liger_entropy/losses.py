"""The losses: every option is plain PyTorch on the ``[T]`` statistics of token_statistics.py.

loss = CE + z_loss - entropy_coef * H
CE   = -((1 - eps) c_y logprob + eps smooth_logprob)      as torch.nn.functional.cross_entropy
z    = lse_square_scale * lse^2                           as in PaLM and Liger
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import distributed, planner
from .checks import check_float, check_is_given, check_order, finite
from .planner import ComputeOptions
from .token_statistics import Call, TokenStatistics

if TYPE_CHECKING:
    from liger_kernel.transformers.functional import CrossEntropyOutput as _LigerOutput
else:
    try:
        from liger_kernel.transformers.functional import CrossEntropyOutput as _LigerOutput
    except ImportError:  # Liger needs Triton; without it there is no call site to stay compatible with

        @dataclass
        class _LigerOutput:
            loss: Tensor
            z_loss: Tensor | None = None
            token_accuracy: Tensor | None = None
            predicted_tokens: Tensor | None = None


@dataclass
class CrossEntropyOutput(_LigerOutput):
    """Liger's output with one more field. Scalars for reductions "mean" and "sum", else in the target's shape.

    loss, z_loss (already in loss), token_accuracy (fraction of kept tokens whose prediction is the label),
    predicted_tokens (int64, -1 at ignored tokens; always one per token), entropy_loss (H in nats, not scaled by
    entropy_coef, differentiable).
    """

    entropy_loss: Tensor | None = None


@dataclass(frozen=True)
class LossOptions:
    """The options that turn statistics into a loss; see :func:`linear_cross_entropy`."""

    reduction: str = "mean"
    label_smoothing: float = 0.0
    lse_square_scale: float = 0.0
    entropy_coef: float = 0.0
    return_entropy_loss: bool = False
    return_z_loss: bool = False
    return_token_accuracy: bool = False
    return_predicted_tokens: bool = False
    use_token_scaling: bool = False

    def __post_init__(self):
        if self.reduction not in ("mean", "sum", "none"):
            raise ValueError(f"reduction: expected 'mean', 'sum' or 'none', got {self.reduction!r}")
        if not 0.0 <= finite("label_smoothing", self.label_smoothing) <= 1.0:
            raise ValueError(f"label_smoothing: expected a number in [0, 1], got {self.label_smoothing}")
        finite("lse_square_scale", self.lse_square_scale)
        finite("entropy_coef", self.entropy_coef)
        for name in ("return_entropy_loss", "return_z_loss", "return_token_accuracy", "return_predicted_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name}: expected True or False, got {getattr(self, name)!r}")

    @property
    def wanted(self) -> dict[str, bool]:
        """The optional statistics that the loss needs."""
        return {
            "entropy": self.entropy_coef != 0 or self.return_entropy_loss,
            "smooth": self.label_smoothing != 0,
            "prediction": self.return_token_accuracy or self.return_predicted_tokens,
        }


def compose(
    statistics: TokenStatistics,
    target: Tensor,  # [...]
    options: LossOptions,
    *,
    ignore_index: int = -100,
    class_weight: Tensor | None = None,  # [V]
    token_weight: Tensor | None = None,  # [...]
    reduction_group: str = "",  # name of the group of ranks over whose tokens sums and means run; "": this rank's
) -> CrossEntropyOutput:
    """The loss and its parts. Contract: means run over kept tokens; CE divides by ``sum token_weight class_weight[y]``,
    z-loss and H by ``sum token_weight``; a sum of weights of 0 gives 0; a token of weight 0 contributes exactly 0."""
    target = target.long()  # a narrower dtype would wrap the ignore_index that it is compared with
    kept, dtype = target != ignore_index, statistics.logprob.dtype
    weight = None if token_weight is None else torch.where(kept, token_weight.to(dtype), 0.0)
    class_of_target = None
    if class_weight is not None:
        class_of_target = _weight_of(torch.where(kept, target, 0), class_weight, dtype)
    total = kept.sum() if weight is None else weight.sum()

    def reduce(values: Any, divisor: Tensor = total) -> Tensor:
        return _reduce(_weighted(weight, values), divisor, options.reduction, reduction_group)

    ce, z, entropy = _parts(statistics, class_of_target, options)
    if class_of_target is None:
        loss = reduce(_sum(ce, z, entropy, options.entropy_coef))
    else:
        loss = reduce(ce, (kept * class_of_target if weight is None else weight * class_of_target).sum())
        rest = _sum(None, z, entropy, options.entropy_coef)
        loss = loss if rest is None else loss + reduce(rest)
    return CrossEntropyOutput(
        loss=loss,
        z_loss=reduce(z) if options.return_z_loss else None,
        token_accuracy=_accuracy(statistics, target, kept, options, reduction_group),
        predicted_tokens=statistics.prediction if options.return_predicted_tokens else None,
        entropy_loss=reduce(entropy) if options.return_entropy_loss else None,
    )


def _parts(statistics: TokenStatistics, class_of_target: Tensor | None, options: LossOptions):
    """CE, z-loss and H of every token, None where not wanted; all are exactly 0 at ignored tokens."""
    scale = statistics.logprob.detach().exp() if options.use_token_scaling else None
    ce, z = _cross_entropy(statistics, class_of_target, options.label_smoothing), None
    if options.lse_square_scale != 0 or options.return_z_loss:
        z = options.lse_square_scale * statistics.lse * statistics.lse  # its square may overflow
    if scale is not None:
        ce, z = ce * scale, None if z is None else z * scale
    return ce, z, statistics.entropy if options.wanted["entropy"] else None


def _sum(ce: Tensor | None, z: Tensor | None, entropy: Tensor | None, entropy_coef: float) -> Any:
    """What there is of ``ce + z - entropy_coef entropy``."""
    loss = z if ce is None else ce if z is None else ce + z
    if entropy is None or entropy_coef == 0:
        return loss
    return -entropy_coef * entropy if loss is None else torch.sub(loss, entropy, alpha=entropy_coef)


def _weight_of(target: Tensor, class_weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight of each token's class; NaN for a label that is no class, which only unchecked labels can be."""
    last = len(class_weight) - 1
    valid = (target >= 0) & (target <= last)
    return torch.where(valid, class_weight.to(dtype)[target.clamp(0, last)], math.nan)


def _cross_entropy(statistics: TokenStatistics, class_of_target: Tensor | None, label_smoothing: float) -> Tensor:
    """0.0 - x rather than -x, which would be -0.0 at ignored tokens."""
    logprob = statistics.logprob
    if label_smoothing == 1.0:
        return 0.0 - statistics.smooth_logprob
    if class_of_target is not None:
        logprob = _weighted(class_of_target, logprob)
    if label_smoothing == 0.0:
        return 0.0 - logprob
    return 0.0 - ((1.0 - label_smoothing) * logprob + label_smoothing * statistics.smooth_logprob)


def _weighted(weight: Tensor | None, values: Tensor) -> Tensor:
    """weight * values, and exactly 0 where the weight is 0, also for an infinite value and in the values' gradient. The
    weight's own gradient there is the value, if that is finite."""
    if weight is None:
        return values
    zero, at_zero = weight == 0, 0.0
    if weight.requires_grad:
        at_zero = values.detach()
        at_zero = torch.where(at_zero.isfinite(), at_zero, 0.0)
    return weight * torch.where(zero, at_zero, values)


def _reduce(values: Tensor, divisor: Tensor, reduction: str, group: str) -> Tensor:
    """divisor: the sum of weights, or a count of tokens."""
    if reduction == "none":
        return values
    total = values.sum()
    if group:
        total, divisor = distributed.sum_over_ranks(torch.stack([total, divisor.to(total.dtype)]), group).unbind()
    if reduction == "sum":
        return total
    if not divisor.is_floating_point():
        return total / divisor.clamp(min=1)  # no token: the total is 0 and none of its terms has a gradient
    # Dividing by inf gives the 0 with gradient 0 that the contract asks for when nothing is kept.
    return total / divisor.masked_fill(divisor == 0, float("inf"))


def _accuracy(
    statistics: TokenStatistics, target: Tensor, kept: Tensor, options: LossOptions, group: str
) -> Tensor | None:
    if not options.return_token_accuracy:
        return None
    dtype = statistics.logprob.dtype
    correct = ((statistics.prediction == target) & kept).to(dtype)
    return _reduce(correct, kept.sum(), "none" if options.reduction == "none" else "mean", group)


def fused_loss(
    call: Call,
    loss_options: LossOptions,
    token_weight: Tensor | None = None,
    options: ComputeOptions | None = None,
    reduction_group: Any = None,
) -> Tensor | CrossEntropyOutput:
    """The one path of every entry point: statistics of a checked call, composed; a bare loss unless more was asked."""
    with call.telling():
        if token_weight is not None:
            token_weight = _checked_token_weight(token_weight, call.labels)
        tokens_of = _reduction_group(reduction_group, loss_options, call)

    def composed(statistics: TokenStatistics) -> CrossEntropyOutput:
        return compose(
            statistics, call.labels, loss_options, ignore_index=call.ignore_index, class_weight=call.class_weight,
            token_weight=token_weight, reduction_group=tokens_of,
        )  # fmt: skip

    output = call.statistics(planner.checked_options(options), composed, **loss_options.wanted)
    o = loss_options
    more = o.return_entropy_loss or o.return_z_loss or o.return_token_accuracy or o.return_predicted_tokens
    return output if more else output.loss


def _reduction_group(group: Any, loss_options: LossOptions, call: Call) -> str:
    """The group's name, "" without one."""
    group = distributed.as_group("reduction_group", group)
    if group is None:
        return ""
    if loss_options.reduction == "none":
        raise ValueError("reduction_group: has no meaning with reduction='none', which sums over no tokens")
    if call.group is not None and call.group.group_name == group.group_name:
        raise ValueError(
            "reduction_group: is the group that shares the vocabulary, whose ranks hold the same tokens; "
            "its ranks must hold different ones"
        )
    return group.group_name


def _checked_token_weight(token_weight, target: Tensor) -> Tensor:
    check_float("token_weight", token_weight)
    if token_weight.numel() != target.numel():
        raise ValueError(
            f"token_weight: expected one value per token, {tuple(target.shape)}, got {tuple(token_weight.shape)}"
        )
    check_order("token_weight", token_weight.shape, target.shape)
    if token_weight.device != target.device:
        raise ValueError(f"token_weight: is on {token_weight.device}, but target is on {target.device}")
    return token_weight.reshape(target.shape)


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    token_weight: Tensor | None = None,
    ignore_index: int | None = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    entropy_coef: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float | Tensor | None = 1.0,
    return_entropy_loss: bool = False,
    return_z_loss: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    process_group: Any = None,
    options: ComputeOptions | None = None,
    vocab_size: int | None = None,
    reduction_group: Any = None,
) -> Tensor | CrossEntropyOutput:
    """Cross-entropy and entropy of ``softmax(z)``, ``z = softcap(logit_scale (input weight^T + bias)) / temperature``.

    ``loss = CE + z_loss - entropy_coef * H``, in fp32 nats (fp64 for fp64 inputs). Label smoothing, class weights and
    z-loss never change H. Differentiable in input, linear_weight, linear_bias and token_weight, once.

    Args:
        input: ``[..., D]``; linear_weight: ``[V, D]``; target: ``[...]``; linear_bias: ``[V]``; see
            :func:`linear_token_statistics` for these and for ignore_index, softcap, logit_scale, temperature,
            process_group, options, vocab_size.
        weight: ``[V]`` class weights, torch's rule: the mean of CE divides by ``sum token_weight weight[y]``. They
            leave the z-loss and H alone (Liger's rule).
        token_weight: one weight per token; multiplies CE, z-loss and H. A token of weight 0 has exactly zero gradient.
        reduction: ``"mean"`` over kept tokens, ``"sum"``, or ``"none"`` (the target's shape, 0 at ignored tokens).
            With no kept token the mean is 0 with zero gradients (torch gives NaN).
        label_smoothing: eps in [0, 1], torch's rule.
        lse_square_scale: factor of the z-loss ``lse^2`` (PaLM, Chowdhery et al. 2022, section 5).
        entropy_coef: H is subtracted with this factor; positive keeps the distribution broad.
        return_entropy_loss, return_z_loss, return_token_accuracy, return_predicted_tokens: ask for a
            :class:`CrossEntropyOutput` with these fields instead of a bare loss.
        reduction_group: ranks that hold different tokens (data, context or sequence parallel), or None: sums and means
            run over this rank's tokens. With a group they run over the kept tokens of all its ranks, which all get the
            same value. **The gradient carries the factor W, the number of its ranks**, which averaging the gradients
            over the same ranks, as DDP and FSDP do, takes away: the average is the gradient of the mean over all
            tokens. Where gradients are summed over the ranks instead, divide the loss by W. Every rank must call.

    Raises:
        ValueError, TypeError, RuntimeError: as :func:`linear_token_statistics`; ValueError also for an unknown
            reduction, a label_smoothing outside [0, 1], a token_weight of the wrong size, and a reduction_group that
            shares the vocabulary or stands beside reduction "none".
    """
    loss_options = LossOptions(
        reduction, label_smoothing, lse_square_scale, entropy_coef,
        return_entropy_loss, return_z_loss, return_token_accuracy, return_predicted_tokens,
    )  # fmt: skip
    check_is_given("linear_weight", linear_weight)
    call = Call(
        input, linear_weight, target, linear_bias, weight, ignore_index, softcap, logit_scale, temperature,
        process_group, vocab_size,
    )  # fmt: skip
    return fused_loss(call, loss_options, token_weight, options, reduction_group)


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    token_weight: Tensor | None = None,
    ignore_index: int | None = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    entropy_coef: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float | Tensor | None = 1.0,
    return_entropy_loss: bool = False,
    return_z_loss: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    process_group: Any = None,
    options: ComputeOptions | None = None,
    vocab_size: int | None = None,
) -> Tensor | CrossEntropyOutput:
    """:func:`linear_cross_entropy` on given ``logits [..., V]`` (classes last), whose gradient has the logits' dtype.

    The logits are read once forward and once backward; they are never written to. With process_group every rank passes
    its columns of the logits, and gets their gradient.
    """
    loss_options = LossOptions(
        reduction, label_smoothing, lse_square_scale, entropy_coef,
        return_entropy_loss, return_z_loss, return_token_accuracy, return_predicted_tokens,
    )  # fmt: skip
    call = Call(
        logits, None, target, None, weight, ignore_index, softcap, logit_scale, temperature, process_group, vocab_size
    )
    return fused_loss(call, loss_options, token_weight, options)
