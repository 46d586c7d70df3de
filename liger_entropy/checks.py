"""Checks of a call's arguments, before any work: each error names the argument, what came and what was expected."""

from __future__ import annotations

import math
import numbers

import torch
from torch import Tensor

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def _check_transforms() -> None:
    """Inside torch.func.jvp the op would give the derivative 0."""
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        raise RuntimeError(
            "liger_entropy: inside torch.func transforms (grad, vjp, jvp, vmap, ...), which are not supported; "
            "use torch.autograd, or plain logits"
        )


def check_tensors(input, weight, target, bias, class_weight, sharded: bool) -> None:
    """Types, dtypes, devices and shapes, before any work. A shard of the vocabulary may be empty."""
    _check_transforms()
    name = "logits" if weight is None else "input"
    check_float(name, input)
    if not isinstance(target, Tensor) or target.dtype not in _INTEGERS:
        kind = target.dtype if isinstance(target, Tensor) else type(target).__name__
        raise TypeError(f"target: expected an integer tensor of class indices, got {kind}")
    if input.ndim < 1 or (input.shape[-1] == 0 and not (sharded and weight is None)):
        last = "V" if weight is None else "D"
        raise ValueError(f"{name}: expected shape [..., {last}] with {last} >= 1, got {tuple(input.shape)}")
    if math.prod(input.shape[:-1]) != target.numel():
        raise ValueError(
            f"target: {name} of shape {tuple(input.shape)} holds one row per token, "
            f"but target has shape {tuple(target.shape)}"
        )
    check_order(name, input.shape[:-1], target.shape)
    if weight is not None:
        check_weight(input, weight, sharded)
    for label, vector in (("linear_bias", bias), ("class_weight", class_weight)):
        if vector is not None:
            check_float(label, vector)
            # How many class weights there must be depends on the other ranks, see Call._shard_class_weight.
            rows = input.shape[-1] if weight is None else weight.shape[0]
            size = len(vector) if vector is class_weight and vector.ndim == 1 else rows
            if tuple(vector.shape) != (size,):
                raise ValueError(f"{label}: expected shape ({size},), one value per class, got {tuple(vector.shape)}")
    if class_weight is not None and class_weight.requires_grad and torch.is_grad_enabled():
        raise TypeError("class_weight: requires grad, but the loss is not differentiable in it; pass it detached")
    for label, tensor in (
        ("linear_weight", weight),
        ("target", target),
        ("linear_bias", bias),
        ("class_weight", class_weight),
    ):
        if tensor is not None and tensor.device != input.device:
            raise ValueError(f"{label}: is on {tensor.device}, but {name} is on {input.device}")


def check_order(name: str, shape: torch.Size, target: torch.Size) -> None:
    """Values are taken in the order of memory whatever the shape, but not where one shape is the other transposed."""
    if shape == target or len(shape) < 2 or len(target) < 2:
        return
    sizes, expected = [n for n in shape if n != 1], [n for n in target if n != 1]
    if sizes != expected and sorted(sizes) == sorted(expected):
        raise ValueError(
            f"{name}: holds tokens as {tuple(shape)}, but target as {tuple(target)}, which is another order; "
            "transpose one of them"
        )


def check_float(name: str, tensor) -> None:
    if not isinstance(tensor, Tensor) or tensor.dtype not in _FLOATS:
        kind = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        raise TypeError(f"{name}: expected a float16, bfloat16, float32 or float64 tensor, got {kind}")


def check_is_given(name: str, tensor) -> None:
    """A weight of None stands for given logits further down, where nobody could tell."""
    if tensor is None:
        raise TypeError(f"{name}: expected a tensor [V, D], got None; losses of given logits are cross_entropy's")


def check_weight(input: Tensor, weight: Tensor, sharded: bool) -> None:
    check_float("linear_weight", weight)
    if weight.ndim != 2 or weight.shape[1] != input.shape[-1] or (weight.shape[0] == 0 and not sharded):
        hint = "; a flat or empty weight is a shard of FSDP or ZeRO-3: call the loss where the parameter is gathered"
        raise ValueError(
            f"linear_weight: expected shape [V, {input.shape[-1]}] to fit an input of shape {tuple(input.shape)}, "
            f"got {tuple(weight.shape)}{hint if weight.ndim == 1 or weight.numel() == 0 else ''}"
        )


def number(name: str, value) -> float:
    """A Python or NumPy number."""
    if isinstance(value, bool) or not isinstance(value, (int, float, numbers.Real)):
        raise TypeError(f"{name}: expected a number, got {type(value).__name__}")
    return float(value)


def finite(name: str, value) -> float:
    # Not math.isfinite, which has no answer for the symbolic numbers of torch.compile(dynamic=True).
    if not -math.inf < number(name, value) < math.inf:
        raise ValueError(f"{name}: expected a finite number, got {value}")
    return float(value)


# The reciprocals of all numbers between are finite in fp32.
_LEAST, _LARGEST = 2.0**-126, 2.0**126


def positive(name: str, value) -> float:
    if not finite(name, value) > 0:
        raise ValueError(f"{name}: expected a number > 0, got {value}")
    if not _LEAST <= value <= _LARGEST:
        raise ValueError(f"{name}: expected a number whose reciprocal fp32 can hold, got {value}")
    return float(value)


def integer(name: str, value) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, numbers.Integral)):
        raise TypeError(f"{name}: expected an integer, got {type(value).__name__}")
    return value if isinstance(value, int) else int(value)  # symbolic ones of torch.compile stay


def checked_vocab_size(value) -> int:
    if (size := integer("vocab_size", value)) < 1:
        raise ValueError(f"vocab_size: expected an integer >= 1, got {value}")
    return size


def checked_temperature(temperature: Tensor, target: Tensor, shape: torch.Size) -> Tensor:
    """[T], one value per token; a tensor of one element stands for all. target [T], and the shape it came in."""
    check_float("temperature", temperature)
    if temperature.requires_grad and torch.is_grad_enabled():
        raise TypeError("temperature: requires grad, but the statistics are not differentiable in it; pass it detached")
    if temperature.numel() not in (1, target.numel()):
        raise ValueError(
            f"temperature: expected a number or one value per token ({target.numel()}), "
            f"got shape {tuple(temperature.shape)}"
        )
    check_order("temperature", temperature.shape, shape)
    return temperature.to(target.device).reshape(-1).expand(target.numel())


def product_dtype(input: Tensor, weight: Tensor | None) -> torch.dtype:
    """The dtype of F.linear's operands here."""
    if weight is None:
        return input.dtype
    device = input.device.type
    if device != "meta" and torch.is_autocast_enabled(device) and torch.float64 not in (input.dtype, weight.dtype):
        return torch.get_autocast_dtype(device)
    if input.dtype != weight.dtype:
        raise TypeError(
            f"linear_weight: is {weight.dtype}, but input is {input.dtype}; "
            "cast one of them, or use torch.autocast to multiply in one dtype"
        )
    return input.dtype
