"""Liger's own layer kernels (RMSNorm, RoPE, SwiGLU or GeGLU) on one instance, and nowhere else.

Liger changes the layers of the instance it is given, by attributes of each, but also the names of the family's module
(``modeling_llama.LlamaRMSNorm``, ``apply_rotary_pos_emb``, for some families ``torch.nn.LayerNorm``), which would reach
every model of the process, on a CPU too. Here those names are put back, and the attention layers of the instance get a
forward that sees Liger's RoPE.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable
from types import CellType, FunctionType
from typing import Any

from torch import nn

_APPLIED = "_liger_entropy_kernels"
# What Liger's kernels compute, whatever the configuration says.
_ACTIVATIONS = {"swiglu": {"silu", "swish"}, "geglu": {"gelu_pytorch_tanh"}}


def apply_layer_kernels(model: nn.Module) -> bool:
    """Apply them with Liger's cross-entropy patches left out; whether anything was done. Warns where nothing was."""
    reason = _reason_against(model)
    if reason is not None:
        warnings.warn(f"liger_kernels: nothing was applied to {type(model).__name__}: {reason}", stacklevel=3)
        return False
    apply = _liger_function(model)
    assert apply is not None
    before = {module: dict(module.__dict__) for module in model.modules()}
    names = _names()
    try:
        apply(model=model, **_switched_off(apply, model))
    finally:
        changed = _put_back(names)
        for module in before:
            _use_functions(module, changed)
        model.__dict__[_APPLIED] = [(module, *_difference(module.__dict__, old)) for module, old in before.items()]
    return True


def remove_layer_kernels(model: nn.Module) -> None:
    """Undo :func:`apply_layer_kernels`: every attribute that it set on a module is as it was."""
    for module, added, replaced in model.__dict__.pop(_APPLIED, ()):
        for name in added:
            module.__dict__.pop(name, None)
        module.__dict__.update(replaced)


def has_layer_kernels(model: nn.Module) -> bool:
    return _APPLIED in model.__dict__


def _difference(new: dict[str, Any], old: dict[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """The names that are new, and the old values of those that changed."""
    return [*(new.keys() - old.keys())], {name: value for name, value in old.items() if new.get(name) is not value}


def _reason_against(model: nn.Module) -> str | None:
    if not _on_cuda(model):
        return "the kernels need a CUDA device, and the model is not on one"
    try:
        function = _liger_function(model)
    except ImportError as error:  # of this release of transformers
        return f"liger-kernel's layer kernels cannot be imported: {error}"
    if function is None:
        return "liger-kernel has no kernels for this family"
    if any("forward" in module.__dict__ for module in model.modules()):
        return (
            "a layer's forward was already replaced (a device map, or Liger's own patch), and Liger would overwrite it"
        )
    return None


def _on_cuda(model: nn.Module) -> bool:
    return all(parameter.is_cuda for parameter in model.parameters())


def _liger_function(model: nn.Module) -> Callable | None:
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    return MODEL_TYPE_TO_APPLY_LIGER_FN.get(getattr(getattr(model, "config", None), "model_type", ""))


def _switched_off(apply: Callable, model: nn.Module) -> dict[str, bool]:
    """The losses, and the MLP kernels of another activation than the model's: Liger does not look at it."""
    parameters = inspect.signature(apply).parameters
    off = {name for name in parameters if name.endswith("cross_entropy")}
    config: Any = model.config
    config = config.get_text_config()
    stated = {getattr(config, name, None) for name in ("hidden_act", "hidden_activation")} - {None}
    passes_on = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    off |= {name for name, known in _ACTIVATIONS.items() if (name in parameters or passes_on) and not stated <= known}
    return dict.fromkeys(off, False)


def _names() -> dict[str, dict[str, Any]]:
    """What every module that Liger may write to says now."""
    written = [name for name in sys.modules if ".modeling_" in name or name == "torch.nn"]
    return {name: dict(vars(sys.modules[name])) for name in written}


def _put_back(names: dict[str, dict[str, Any]]) -> dict[str, dict[str, Callable]]:
    """Restore the modules; the functions that replaced functions come back, by module."""
    changed: dict[str, dict[str, Callable]] = {}
    for module_name, old in names.items():
        new = vars(sys.modules[module_name])
        added, replaced = _difference(new, old)
        changed[module_name] = {name: new[name] for name, value in replaced.items() if inspect.isfunction(value)}
        new.update(replaced)
        for name in added:
            del new[name]
    return changed


def _use_functions(module: nn.Module, changed: dict[str, dict[str, Callable]]) -> None:
    """Give the module a forward that sees the changed functions of the file it is defined in, if it calls any."""
    forward = type(module).forward
    functions = changed.get(getattr(forward, "__module__", ""))
    if (
        functions
        and "forward" not in module.__dict__
        and functions.keys() & {*inspect.unwrap(forward).__code__.co_names}
    ):
        module.__dict__["forward"] = _seeing(forward, functions).__get__(module)


def _seeing(function: Any, names: dict[str, Callable]) -> FunctionType:
    """A copy of a function, through its decorators, that sees ``names`` among its globals.

    Without ``__name__`` there: Dynamo would look globals up in the module of that name instead.
    """
    scope, cells, inner = function.__globals__, function.__closure__, getattr(function, "__wrapped__", None)
    if inner is None:
        scope = {**{name: value for name, value in scope.items() if name != "__name__"}, **names}
    else:
        copy = _seeing(inner, names)
        cells = tuple(CellType(copy) if cell.cell_contents is inner else cell for cell in cells)
    result = FunctionType(function.__code__, scope, function.__name__, function.__defaults__, cells)
    result.__kwdefaults__, result.__doc__ = function.__kwdefaults__, function.__doc__
    result.__module__, result.__dict__ = function.__module__, {**function.__dict__}
    if inner is not None:
        result.__wrapped__ = copy
    return result
