"""linear_token_statistics: checks, flattening, dropping of ignored tokens, and the call of the operator."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import ops, planner
from .engine import Settings
from .planner import ComputeOptions

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@dataclass(frozen=True)
class TokenStatistics:
    """Per-token statistics of the distribution ``softmax(z)``. All have the shape of the target.

    logprob, entropy, lse and smooth_logprob are fp32 (fp64 for fp64 inputs), in nats, and differentiable in input,
    weight and bias; prediction is int64. At ignored tokens they are exactly 0, and -1 for prediction.
    """

    logprob: Tensor  # log p_y
    entropy: Tensor  # -sum_j p_j log p_j
    lse: Tensor  # log sum_j e^(z_j)
    smooth_logprob: Tensor  # 1/V sum_j c_j log p_j, c = class_weight or 1
    prediction: Tensor  # argmax_j z_j, the first of equals


def linear_token_statistics(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    class_weight: Tensor | None = None,
    ignore_index: int | None = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float | Tensor | None = 1.0,
    process_group: Any = None,
    options: ComputeOptions | None = None,
) -> TokenStatistics:
    """Log-probability, entropy and more of every token, without the ``[T, V]`` logits.

    The logits are ``z = softcap(logit_scale (input weight^T + bias)) / temperature`` with
    ``softcap(a) = softcap tanh(a / softcap)``; the formulas are in ``equations.py``.

    Args:
        input: ``[..., D]`` hidden states, fp16, bf16, fp32 or fp64, any strides.
        linear_weight: ``[V, D]``, dtype of the input (under autocast both may differ and the products run in the
            autocast dtype).
        target: ``[...]`` class indices of any integer dtype, as many as there are hidden states.
        linear_bias: ``[V]``, any float dtype; added in fp32.
        class_weight: ``[V]`` weights c of smooth_logprob; not differentiable.
        ignore_index: label of tokens that take no part; None means -100.
        softcap: c > 0, or None for none.
        logit_scale: factor on the logits before the softcap.
        temperature: > 0, a number or a tensor with one value per token; not differentiable. None means 1.
        process_group: ranks that share the vocabulary, each with its rows of the weight; None: no sharding.
        options: :class:`ComputeOptions`.

    Returns:
        TokenStatistics, each field in the target's shape.

    Raises:
        ValueError: shapes that do not match, a label outside ``[0, V)`` that is not ignore_index, temperature or softcap
            not positive, tensors on different devices.
        TypeError: dtypes that do not fit, or a class_weight or temperature that requires grad.
        RuntimeError: an explicit backend that cannot run; a second derivative.
    """
    call = Call(input, linear_weight, target, linear_bias, class_weight, ignore_index, softcap, logit_scale, temperature)
    return call.statistics(options or ComputeOptions(), process_group, entropy=True, smooth=True, prediction=True)


class Call:
    """A checked call: tensors flattened to ``[T, ...]``. ``weight`` None: ``input`` holds given logits ``[..., V]``."""

    def __init__(
        self, input, weight, target, bias, class_weight, ignore_index, softcap, logit_scale, temperature
    ):  # fmt: skip
        self.shape = tuple(target.shape) if isinstance(target, Tensor) else ()
        _check_tensors(input, weight, target, bias, class_weight)
        self.vocab = input.shape[-1] if weight is None else weight.shape[0]
        self.input = input.reshape(-1, input.shape[-1])
        self.weight, self.bias = weight, bias
        self.class_weight = class_weight
        self.target = target.reshape(-1).to(torch.int64)
        self.ignore_index = -100 if ignore_index is None else _integer("ignore_index", ignore_index)
        self.softcap = 0.0 if softcap is None else _positive("softcap", softcap)
        self.logit_scale = _finite("logit_scale", logit_scale)
        self.temperature, self.inverse_temperature = None, 1.0
        if isinstance(temperature, Tensor):
            self.temperature = _temperature(temperature, self.target)
        elif temperature is not None:
            self.inverse_temperature = 1.0 / _positive("temperature", temperature)

    def statistics(
        self, options: ComputeOptions, process_group, *, entropy: bool, smooth: bool, prediction: bool
    ) -> TokenStatistics:
        """Run the operator; a statistic that is not wanted comes back empty."""
        dtype = _product_dtype(self.input, self.weight)
        backend = planner.choose_backend(options.backend, self.input.device, dtype)
        order, count = self._inspect(options)
        chunk, cache = self._plan(options, backend, dtype, len(self.target) if order is None else len(order))
        settings = Settings(
            self.ignore_index, 0, self.vocab, self.logit_scale, self.softcap, self.inverse_temperature, dtype, backend,
            chunk, cache, entropy, smooth, prediction, "",
        )  # fmt: skip
        outputs = ops.token_statistics(
            self.input, self.weight, self.target, self.bias, self.class_weight, self.temperature, order, count, *settings
        )
        return TokenStatistics(*(o.view(self.shape) if o.numel() == len(self.target) else o for o in outputs[:5]))

    def _inspect(self, options: ComputeOptions) -> tuple[Tensor | None, Tensor | None]:
        """order and count of the kept rows (None: all), after checking the labels."""
        if not (options.skip_ignored or options.check_labels):
            return None, None
        order, count = ops.inspect_rows(
            self.target, self.temperature, self.ignore_index, self.vocab, options.check_labels
        )
        if not options.skip_ignored or self.weight is None:
            return None, None
        if torch.compiler.is_compiling():
            return order, count
        kept = int(count)
        return (None, None) if kept == len(self.target) else (order[:kept], count)

    def _plan(self, options: ComputeOptions, backend: str, dtype: torch.dtype, rows: int) -> tuple[int, int]:
        """Columns of a chunk and of the cache."""
        if self.weight is None:
            return self.vocab, 0
        chunk = planner.chunk_columns(rows, self.vocab, backend, options.chunk_bytes)
        if not torch.is_grad_enabled():
            return chunk, 0
        gradients = self.weight.numel() * self.weight.element_size() + 3 * self.input.numel() * 4 + rows * chunk * 4
        budget = planner.cache_budget(options.cache_bytes, self.input.device, gradients)
        return chunk, planner.cache_columns(rows, self.vocab, chunk, budget, dtype.itemsize)


def _check_tensors(input, weight, target, bias, class_weight) -> None:
    """Types, dtypes, devices and shapes, before any work."""
    name = "logits" if weight is None else "input"
    _check_float(name, input)
    if not isinstance(target, Tensor) or target.dtype not in _INTEGERS:
        kind = target.dtype if isinstance(target, Tensor) else type(target).__name__
        raise TypeError(f"target: expected an integer tensor of class indices, got {kind}")
    if input.ndim < 1 or input.numel() // max(input.shape[-1], 1) != target.numel() or input.shape[-1] == 0:
        raise ValueError(
            f"target: {name} of shape {tuple(input.shape)} holds one row per token, "
            f"but target has shape {tuple(target.shape)}"
        )
    if weight is not None:
        _check_weight(input, weight)
    vocab = input.shape[-1] if weight is None else weight.shape[0]
    for label, vector in (("linear_bias", bias), ("class_weight", class_weight)):
        if vector is not None:
            _check_float(label, vector)
            if tuple(vector.shape) != (vocab,):
                raise ValueError(f"{label}: expected shape ({vocab},), one value per class, got {tuple(vector.shape)}")
    if class_weight is not None and class_weight.requires_grad:
        raise TypeError("class_weight: requires grad, but the loss is not differentiable in it; pass it detached")
    for label, tensor in (("linear_weight", weight), ("target", target), ("linear_bias", bias), ("class_weight", class_weight)):
        if tensor is not None and tensor.device != input.device:
            raise ValueError(f"{label}: is on {tensor.device}, but {name} is on {input.device}")


def _check_float(name: str, tensor) -> None:
    if not isinstance(tensor, Tensor) or tensor.dtype not in _FLOATS:
        kind = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        raise TypeError(f"{name}: expected a float16, bfloat16, float32 or float64 tensor, got {kind}")


def _check_weight(input: Tensor, weight: Tensor) -> None:
    _check_float("linear_weight", weight)
    if weight.ndim != 2 or weight.shape[1] != input.shape[-1] or weight.shape[0] == 0:
        hint = "; a flat or empty weight is a shard of FSDP or ZeRO-3: call the loss where the parameter is gathered"
        raise ValueError(
            f"linear_weight: expected shape [V, {input.shape[-1]}] to fit an input of shape {tuple(input.shape)}, "
            f"got {tuple(weight.shape)}{hint if weight.ndim == 1 or weight.numel() == 0 else ''}"
        )


def _number(name: str, value) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}: expected a number, got {type(value).__name__}")
    return float(value)


def _finite(name: str, value) -> float:
    if not math.isfinite(_number(name, value)):
        raise ValueError(f"{name}: expected a finite number, got {value}")
    return float(value)


def _positive(name: str, value) -> float:
    if not _finite(name, value) > 0:
        raise ValueError(f"{name}: expected a number > 0, got {value}")
    return float(value)


def _integer(name: str, value) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected an integer, got {type(value).__name__}")
    return value


def _temperature(temperature: Tensor, target: Tensor) -> Tensor:
    """[T], one value per token; a tensor of one element stands for all."""
    _check_float("temperature", temperature)
    if temperature.requires_grad:
        raise TypeError("temperature: requires grad, but the statistics are not differentiable in it; pass it detached")
    if temperature.numel() not in (1, target.numel()):
        raise ValueError(
            f"temperature: expected a number or one value per token ({target.numel()}), got shape {tuple(temperature.shape)}"
        )
    return temperature.to(target.device).reshape(-1).expand(target.numel())


def _product_dtype(input: Tensor, weight: Tensor | None) -> torch.dtype:
    """The dtype of F.linear's operands here."""
    if weight is None:
        return input.dtype
    device = input.device.type
    if torch.is_autocast_enabled(device) and torch.float64 not in (input.dtype, weight.dtype):
        return torch.get_autocast_dtype(device)
    if input.dtype != weight.dtype:
        raise TypeError(
            f"linear_weight: is {weight.dtype}, but input is {input.dtype}; "
            "cast one of them, or use torch.autocast to multiply in one dtype"
        )
    return input.dtype
