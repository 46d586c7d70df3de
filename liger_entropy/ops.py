"""The operator as torch.library custom ops: schemas, fakes and autograd. The work is done in engine.py.

``token_statistics`` gives the five statistics of every token and what its backward needs; ``inspect_rows`` finds the
kept rows and checks the labels, with the one host sync of a call.
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from . import backends, engine
from .engine import Kept, Settings, Tensors, Upstream
from .products import Products

_TENSORS = (
    "Tensor x, Tensor? weight, Tensor target, Tensor? bias, Tensor? class_weight, Tensor? temperature, "
    "Tensor? order, Tensor? count"
)
_SETTINGS = (
    "int ignore_index, SymInt vocab_start, SymInt vocab_size, float logit_scale, float softcap, "
    "float inverse_temperature, ScalarType dtype, str backend, SymInt forward_columns, SymInt backward_columns, SymInt cache_columns, "
    "bool entropy, bool smooth, bool prediction, str group"
)
_UPSTREAM = "Tensor? g_logprob, Tensor? g_entropy, Tensor? g_lse, Tensor? g_smooth"
_KEPT = "Tensor residuals, Tensor cache, Tensor block_max"
_NEEDS = "bool need_x, bool need_weight, bool need_bias"
_STATISTICS = 5


def _split(arguments, *kinds):
    """Positional arguments as the named tuples they stand for; the rest last."""
    parts, start = [], 0
    for kind in kinds:
        stop = start + len(kind._fields)
        parts.append(kind(*arguments[start:stop]))
        start = stop
    return (*parts, arguments[start:])


@contextlib.contextmanager
def _prepared(x: Tensor):
    """Autocast off: the dtype of the products is an argument. The current device is the tensors', where Triton launches."""
    device = torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()
    with torch.autocast(x.device.type, enabled=False), device:
        yield


def _or_empty(outputs, like: Tensor) -> list[Tensor]:
    return [like.new_empty(0) if o is None else o for o in outputs]


@torch.library.custom_op(
    "liger_entropy::token_statistics", mutates_args=(), schema=f"({_TENSORS}, {_SETTINGS}) -> ({', '.join(['Tensor'] * 8)})"
)
def token_statistics(*arguments):
    tensors, settings, _ = _split(arguments, Tensors, Settings)
    with _prepared(tensors.x):
        outputs, kept = engine.forward(tensors, settings)
    return (*_or_empty(outputs[:4], kept.residuals), *_or_empty(outputs[4:], tensors.target), *kept)


@token_statistics.register_fake
def _(*arguments):
    tensors, settings, _ = _split(arguments, Tensors, Settings)
    x, tokens = tensors.x, tensors.target.shape[0]
    kept = tokens if tensors.order is None else tensors.order.shape[0]
    products, width = Products(settings.dtype, x.device), backends.get(settings.backend).BLOCK_COLUMNS
    sizes = (tokens, tokens if settings.entropy else 0, tokens, tokens if settings.smooth else 0)
    return (
        *(x.new_empty(size, dtype=products.accumulator) for size in sizes),
        tensors.target.new_empty(tokens if settings.prediction else 0),
        x.new_empty(4, kept, dtype=products.accumulator),
        x.new_empty(kept, settings.cache_columns, dtype=products.gradient_dtype),
        x.new_empty((settings.cache_columns + width - 1) // width, kept, dtype=products.accumulator),
    )


@torch.library.custom_op(
    "liger_entropy::token_statistics_backward",
    mutates_args=(),
    schema=f"({_UPSTREAM}, {_TENSORS}, {_KEPT}, {_SETTINGS}, {_NEEDS}) -> (Tensor, Tensor, Tensor)",
)
def token_statistics_backward(*arguments):
    upstream, tensors, kept, settings, needs = _split(arguments, Upstream, Tensors, Kept, Settings)
    with _prepared(tensors.x):
        return tuple(_or_empty(engine.backward(upstream, tensors, kept, settings, needs), tensors.x))


@token_statistics_backward.register_fake
def _(*arguments):
    _, tensors, _, _, needs = _split(arguments, Upstream, Tensors, Kept, Settings)
    parameters = (tensors.x, tensors.weight, tensors.bias)
    return tuple(
        torch.empty_like(p) if need and p is not None else tensors.x.new_empty(0)
        for p, need in zip(parameters, needs, strict=True)
    )


def _setup(ctx, inputs, output):
    tensors, settings, _ = _split(inputs, Tensors, Settings)
    ctx.settings = settings
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[_STATISTICS - 1 :])
    ctx.save_for_backward(*tensors, *output[_STATISTICS:])


def _backward(ctx, *gradients):
    tensors, kept, _ = _split(ctx.saved_tensors, Tensors, Kept)
    none = [None] * (len(Tensors._fields) + len(Settings._fields))
    upstream = Upstream(*gradients[: len(Upstream._fields)])
    if all(g is None for g in upstream):
        return tuple(none)
    fields = [Tensors._fields.index(name) for name in ("x", "weight", "bias")]
    needs = [ctx.needs_input_grad[field] for field in fields]
    results = torch.ops.liger_entropy.token_statistics_backward(*upstream, *tensors, *kept, *ctx.settings, *needs)
    for field, need, result in zip(fields, needs, results, strict=True):
        none[field] = result if need else None
    return tuple(none)


token_statistics.register_autograd(_backward, setup_context=_setup)


def _refuse(ctx, *gradients):
    raise RuntimeError(
        "liger_entropy: second derivatives are not implemented; the statistics can be differentiated once "
        "(use create_graph=False, or plain logits where a gradient of a gradient is needed)"
    )


token_statistics_backward.register_autograd(_refuse, setup_context=lambda ctx, inputs, output: None)


@torch.library.custom_op(
    "liger_entropy::inspect_rows",
    mutates_args=(),
    schema="(Tensor target, Tensor? temperature, int ignore_index, SymInt vocab_size, bool check) -> (Tensor, Tensor)",
)
def inspect_rows(target, temperature, ignore_index, vocab_size, check):
    """order [T]: the tokens, kept ones first; count [] on the CPU: how many are kept. Raises for a bad label."""
    if target.numel() == 0 or (target.is_cuda and torch.cuda.is_current_stream_capturing()):
        return torch.arange(target.numel(), device=target.device), torch.tensor(target.numel())
    ignored = target == ignore_index
    bad = ((target < 0) | (target >= vocab_size)) & ~ignored
    first = bad.to(torch.uint8).argmax()
    cold = torch.zeros_like(first) if temperature is None else (~(temperature > 0)).sum()
    summary = torch.stack([ignored.sum(), bad.any().to(first), first, target[first], cold]).tolist()
    if check:
        _raise_for(*summary[1:], ignore_index, vocab_size)
    order = torch.argsort(ignored.to(torch.uint8), stable=True)
    return order, torch.tensor(target.numel() - summary[0])


def _raise_for(bad: int, position: int, label: int, cold: int, ignore_index: int, vocab_size: int) -> None:
    if bad:
        raise ValueError(
            f"target: label {label} at flat position {position} is neither in [0, {vocab_size}) nor ignore_index={ignore_index}"
        )
    if cold:
        raise ValueError(f"temperature: {cold} values are not positive; every token's temperature must be > 0")


@inspect_rows.register_fake
def _(target, temperature, ignore_index, vocab_size, check):
    return target.new_empty(target.shape[0], dtype=torch.int64), torch.empty((), dtype=torch.int64)
