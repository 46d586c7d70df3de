"""Liger's own layer kernels (RMSNorm, RoPE, SwiGLU) on the patched instance."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable

from torch import nn


def apply_layer_kernels(model: nn.Module) -> bool:
    """Apply them with Liger's cross-entropy patches left out; whether anything was done. Warns where nothing was.

    RMSNorm and SwiGLU are changed on this instance. RoPE is a function of the model's module, which Liger replaces for
    every model of the family in this process; it computes the same.
    """
    reason = _reason_against(model)
    if reason is not None:
        warnings.warn(f"liger_kernels: nothing was applied to {type(model).__name__}: {reason}", stacklevel=3)
        return False
    apply = _liger_function(model)
    assert apply is not None
    losses = [name for name in inspect.signature(apply).parameters if name.endswith("cross_entropy")]
    apply(model=model, **dict.fromkeys(losses, False))
    return True


def _reason_against(model: nn.Module) -> str | None:
    if not all(parameter.is_cuda for parameter in model.parameters()):
        return "the kernels need a CUDA device, and the model is not on one"
    if _liger_function(model) is None:
        return "liger-kernel has no kernels for this family"
    return None


def _liger_function(model: nn.Module) -> Callable | None:
    try:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
    except ImportError:
        return None
    return MODEL_TYPE_TO_APPLY_LIGER_FN.get(getattr(getattr(model, "config", None), "model_type", ""))
