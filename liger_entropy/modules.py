"""The two modules with Liger's names, arguments and forward order; subclasses of Liger's where it is installed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .checks import finite, positive
from .liger_api import check_liger_arguments, liger_cross_entropy, liger_fused_linear_cross_entropy
from .losses import CrossEntropyOutput, LossOptions
from .planner import ComputeOptions

if TYPE_CHECKING:
    from liger_kernel.transformers import LigerCrossEntropyLoss as _LigerCrossEntropyLoss
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss as _LigerFusedLinearCrossEntropyLoss
else:
    try:
        from liger_kernel.transformers import LigerCrossEntropyLoss as _LigerCrossEntropyLoss
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss as _LigerFusedLinearCrossEntropyLoss
    except ImportError:  # Liger needs Triton; without it there is no isinstance to keep
        _LigerCrossEntropyLoss = _LigerFusedLinearCrossEntropyLoss = torch.nn.Module


class LigerFusedLinearCrossEntropyLoss(_LigerFusedLinearCrossEntropyLoss):
    """Liger's module of that name, with entropy: ``module(lin_weight [V, D], input [..., D], target [...], bias [V])``.

    All arguments of Liger 0.8.5 in its order and meaning, then return_entropy_loss, and by keyword entropy_coef,
    temperature, logit_scale, process_group, options, vocab_size and reduction_group;
    :func:`liger_entropy.linear_cross_entropy` says what they do, what is differentiable and what is raised.
    """

    def __init__(
        self,
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
        return_entropy_loss: bool = False,
        *,
        entropy_coef: float = 0.0,
        temperature: float | Tensor | None = 1.0,
        logit_scale: float = 1.0,
        process_group: Any = None,
        options: ComputeOptions | None = None,
        vocab_size: int | None = None,
        reduction_group: Any = None,
    ):
        torch.nn.Module.__init__(self)
        check_liger_arguments(accum_dtype, use_token_scaling)
        LossOptions(reduction, label_smoothing, lse_square_scale, entropy_coef)
        _check_transform(softcap, logit_scale, temperature)
        self.ce_weight = ce_weight
        self.ignore_index = ignore_index
        self.lse_square_scale = lse_square_scale
        self.label_smoothing = label_smoothing
        self.reduction = reduction
        self.softcap = softcap
        self.return_z_loss = return_z_loss
        self.accum_dtype = accum_dtype
        self.use_token_scaling = use_token_scaling
        self.return_token_accuracy = return_token_accuracy
        self.return_predicted_tokens = return_predicted_tokens
        self.return_entropy_loss = return_entropy_loss
        self.entropy_coef = entropy_coef
        self.temperature = temperature
        self.logit_scale = logit_scale
        self.process_group = process_group
        self.options = options
        self.vocab_size = vocab_size
        self.reduction_group = reduction_group

    def forward(
        self,
        lin_weight: Tensor,
        _input: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        token_weight: Tensor | None = None,
    ) -> Tensor | CrossEntropyOutput:
        return liger_fused_linear_cross_entropy(
            _input, lin_weight, target, bias, _moved(self.ce_weight, _input), self.ignore_index, self.lse_square_scale,
            self.label_smoothing, self.reduction, self.softcap, self.return_z_loss, self.accum_dtype,
            self.use_token_scaling, self.return_token_accuracy, self.return_predicted_tokens, 1,
            self.return_entropy_loss, token_weight=token_weight, entropy_coef=self.entropy_coef,
            temperature=self.temperature, logit_scale=self.logit_scale, process_group=self.process_group,
            options=self.options, vocab_size=self.vocab_size, reduction_group=self.reduction_group,
        )  # fmt: skip


class LigerCrossEntropyLoss(_LigerCrossEntropyLoss):
    """Liger's module of that name, with entropy: ``module(logits [..., V], target [...])``.

    All arguments of Liger 0.8.5 in its order and meaning, then return_entropy_loss, and by keyword entropy_coef,
    temperature, logit_scale, process_group, options and vocab_size; see :func:`liger_entropy.cross_entropy`.
    """

    def __init__(
        self,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
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
    ):
        torch.nn.Module.__init__(self)
        LossOptions(reduction, label_smoothing, lse_square_scale, entropy_coef)
        _check_transform(softcap, logit_scale, temperature)
        self.weight = weight
        self.ignore_index = ignore_index
        self.lse_square_scale = lse_square_scale
        self.label_smoothing = label_smoothing
        self.reduction = reduction
        self.softcap = softcap
        self.return_z_loss = return_z_loss
        self.return_token_accuracy = return_token_accuracy
        self.return_predicted_tokens = return_predicted_tokens
        self.return_entropy_loss = return_entropy_loss
        self.entropy_coef = entropy_coef
        self.temperature = temperature
        self.logit_scale = logit_scale
        self.process_group = process_group
        self.options = options
        self.vocab_size = vocab_size

    def forward(self, _input: Tensor, target: Tensor) -> Tensor | CrossEntropyOutput:
        return liger_cross_entropy(
            _input, target, _moved(self.weight, _input), None, self.ignore_index, None, self.reduction,
            self.label_smoothing, self.lse_square_scale, self.softcap, self.return_z_loss, self.return_token_accuracy,
            self.return_predicted_tokens, self.return_entropy_loss, entropy_coef=self.entropy_coef,
            temperature=self.temperature, logit_scale=self.logit_scale, process_group=self.process_group,
            options=self.options, vocab_size=self.vocab_size,
        )  # fmt: skip


def _check_transform(softcap, logit_scale, temperature) -> None:
    """What every call would refuse is refused when the module is made, as in Liger."""
    if softcap is not None:
        positive("softcap", softcap)
    finite("logit_scale", logit_scale)
    if temperature is not None and not isinstance(temperature, Tensor):
        positive("temperature", temperature)


def _moved(class_weight: Tensor | None, input: Tensor) -> Tensor | None:
    """Liger keeps class weights as a plain attribute, so module.to() does not move them."""
    return None if class_weight is None else class_weight.to(input.device)
