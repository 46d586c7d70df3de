"""The operator and its backward as torch.library ops: schemas, fakes, autograd. The work is done in engine.py and
gradients.py.

``token_statistics`` gives the five statistics of every token and what its backward needs. Where nobody traces it is
called without the dispatcher, whose layers around Python ops take the host about as long as one product of 128 tokens
takes a GPU; there the forward can be started ahead.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from . import backends, engine, gradients
from .engine import Kept, Settings, Sizes, Tensors, Upstream
from .products import Products, empty_aligned

_TENSORS = (
    "Tensor x, Tensor? weight, Tensor target, Tensor? bias, Tensor? class_weight, Tensor? temperature, "
    "Tensor? order, Tensor? count"
)
# Numbers of a kind travel as one list: torch looks at every argument of a schema again for each argument.
_SETTINGS = "SymInt[] sizes, float[] scales, ScalarType dtype, str backend, bool[] wanted, str group"
_UPSTREAM = "Tensor? g_logprob, Tensor? g_entropy, Tensor? g_lse, Tensor? g_smooth"
_KEPT = "Tensor residuals, Tensor cache, Tensor block_max"
_NEEDS = "bool need_x, bool need_weight, bool need_bias"
_STATISTICS = 5


def _split(arguments, *kinds) -> tuple[Any, ...]:
    """Positional arguments as the named tuples they stand for; the rest last."""
    parts, first = [], 0
    for kind in kinds:
        stop = first + len(kind._fields)
        parts.append(kind(*arguments[first:stop]))
        if kind is Settings:
            parts[-1] = parts[-1]._replace(sizes=Sizes(*parts[-1].sizes))
        first = stop
    return (*parts, arguments[first:])


_NOTHING = contextlib.nullcontext()


def _no_autocast(x: Tensor):
    """The dtype of the products is an argument; autocast would round the operands once more."""
    return torch.autocast(x.device.type, enabled=False) if torch.is_autocast_enabled(x.device.type) else _NOTHING


def on_device(x: Tensor):
    """Triton launches on the current device, so make it the tensors'."""
    return torch.cuda.device(x.device) if x.is_cuda else _NOTHING


def _or_empty(outputs, like: Tensor) -> list[Tensor]:
    return [like.new_empty(0) if o is None else o for o in outputs]


_LIBRARY = torch.library.Library("liger_entropy", "DEF")


def define(name: str, schema: str):
    """Register a function as the op of that name on every device. Library rather than torch.library.custom_op, whose
    wrappers around each call cost more host time than a chunk's launches. Dynamo stays out of the op, which it would
    otherwise compile, or fail to, where a graph break leaves the call itself uncompiled."""
    _LIBRARY.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag,))

    def register(function):
        _LIBRARY.impl(name, torch.compiler.disable(function), "CompositeExplicitAutograd")
        return function

    return register


def fake(name: str):
    return torch.library.register_fake(f"liger_entropy::{name}", lib=_LIBRARY)


@define("token_statistics", f"({_TENSORS}, {_SETTINGS}) -> ({', '.join(['Tensor'] * 8)})")
def _token_statistics(*arguments):
    return _finish(_start(*arguments))


def _start(*arguments, head: int = 0) -> engine.Forward:
    """The forward, with its first `head` columns on their way."""
    tensors, settings, _ = _split(arguments, Tensors, Settings)
    with torch.no_grad(), _no_autocast(tensors.x), on_device(tensors.x):
        return engine.Forward(tensors, settings, head)


def _launch(forward: engine.Forward) -> None:
    tensors = forward.problem.tensors
    with torch.no_grad(), _no_autocast(tensors.x), on_device(tensors.x):
        forward.launch()


def _finish(forward: engine.Forward) -> tuple[Tensor, ...]:
    tensors = forward.problem.tensors
    with _no_autocast(tensors.x), on_device(tensors.x):
        outputs, kept = forward.finish()
    return (*_or_empty(outputs[:4], kept.residuals), *_or_empty(outputs[4:], tensors.target), *kept)


@fake("token_statistics")
def _(*arguments):
    tensors, settings, _ = _split(arguments, Tensors, Settings)
    x, tokens = tensors.x, tensors.target.shape[0]
    kept = tokens if tensors.order is None else tensors.order.shape[0]
    products, width = Products(settings.dtype, x.device), backends.get(settings.backend).BLOCK_COLUMNS
    entropy, smooth, prediction = settings.wanted
    sizes = (tokens, tokens if entropy else 0, tokens, tokens if smooth else 0)
    return (
        *(x.new_empty(size, dtype=products.accumulator) for size in sizes),
        tensors.target.new_empty(tokens if prediction else 0),
        x.new_empty(4, kept, dtype=products.accumulator),
        empty_aligned(x, kept, settings.sizes.cache_columns, products.gradient_dtype),
        x.new_empty((settings.sizes.cache_columns + width - 1) // width, kept, dtype=products.accumulator),
    )


@define(
    "token_statistics_backward",
    f"({_UPSTREAM}, {_TENSORS}, {_KEPT}, {_SETTINGS}, {_NEEDS}) -> (Tensor, Tensor, Tensor)",
)
def _token_statistics_backward(*arguments):
    return _gradients(*_split(arguments, Upstream, Tensors, Kept, Settings))


def _gradients(upstream: Upstream, tensors: Tensors, kept: Kept, settings: Settings, needs) -> tuple[Tensor, ...]:
    with _no_autocast(tensors.x), on_device(tensors.x):
        return tuple(_or_empty(gradients.backward(upstream, tensors, kept, settings, needs), tensors.x))


@fake("token_statistics_backward")
def _(*arguments):
    _, tensors, _, _, needs = _split(arguments, Upstream, Tensors, Kept, Settings)
    rows_first, as_it_is = torch.contiguous_format, torch.preserve_format
    parameters = (tensors.x, rows_first), (tensors.weight, as_it_is), (tensors.bias, as_it_is)
    return tuple(
        torch.empty_like(p, memory_format=layout) if need and p is not None else tensors.x.new_empty(0)
        for (p, layout), need in zip(parameters, needs, strict=True)
    )


def _setup(ctx, inputs, output):
    tensors, settings, _ = _split(inputs, Tensors, Settings)
    _remember(ctx, tensors, settings, output)


def _remember(ctx, tensors: Tensors, settings: Settings, output) -> None:
    ctx.settings = settings
    ctx.set_materialize_grads(False)
    entropy, smooth, _ = settings.wanted
    empty = [o for o, wanted in zip(output[1:4:2], (entropy, smooth), strict=True) if not wanted]
    ctx.mark_non_differentiable(*empty, *output[_STATISTICS - 1 :])
    ctx.save_for_backward(*tensors, *output[_STATISTICS:])


def _backward(ctx, *upstream):
    tensors, kept, _ = _split(ctx.saved_tensors, Tensors, Kept)
    none = [None] * (len(Tensors._fields) + len(Settings._fields))
    upstream = Upstream(*upstream[: len(Upstream._fields)])
    if all(g is None for g in upstream):
        return tuple(none)
    fields = [Tensors._fields.index(name) for name in ("x", "weight", "bias")]
    needs = [ctx.needs_input_grad[field] for field in fields]
    # With create_graph the op is there to refuse second derivatives.
    if torch.is_grad_enabled() or traced(tensors.x):
        op: Any = torch.ops.liger_entropy.token_statistics_backward.default
        results = op(*upstream, *tensors, *kept, *ctx.settings, *needs)
    else:
        results = _run_gradients(upstream, tensors, kept, ctx.settings, needs)
    for field, need, result in zip(fields, needs, results, strict=True):
        none[field] = result if need else None
    return tuple(none)


torch.library.register_autograd("liger_entropy::token_statistics", _backward, setup_context=_setup, lib=_LIBRARY)


def _refuse(ctx, *upstream):
    raise RuntimeError(
        "liger_entropy: second derivatives are not implemented; the statistics can be differentiated once "
        "(use create_graph=False, or plain logits where a gradient of a gradient is needed)"
    )


torch.library.register_autograd(
    "liger_entropy::token_statistics_backward", _refuse, setup_context=lambda ctx, inputs, output: None, lib=_LIBRARY
)


# Dynamo would compile these frames where a graph break leaves the call itself uncompiled.
start: Any = torch.compiler.disable(_start)
launch: Any = torch.compiler.disable(_launch)
_run_finish = torch.compiler.disable(_finish)
_run_gradients: Any = torch.compiler.disable(_gradients)


class _Direct(torch.autograd.Function):
    """The op without the dispatcher. A setup_context would have torch inspect signatures in every call."""

    @staticmethod
    def forward(ctx, *arguments_and_started):
        started = arguments_and_started[-1]
        output = _run_finish(started)
        _remember(ctx, started.problem.tensors, started.problem.settings, output)
        return output

    @staticmethod
    def backward(ctx, *upstream):
        return (*_backward(ctx, *upstream), None)


def traced(x: Tensor) -> bool:
    """Somebody looks for ops: a compiler, a tensor subclass, a dispatch mode; or there is no data, only shapes."""
    looked_for = torch.compiler.is_compiling() or is_in_torch_dispatch_mode()
    return looked_for or type(x) not in (Tensor, Parameter) or x.is_meta


def token_statistics(*arguments, started: engine.Forward | None = None) -> tuple[Tensor, ...]:
    """The op's outputs; of what was `started` with the same arguments, if it was."""
    x, weight, *_ = arguments
    if traced(x) or (weight is not None and traced(weight)):
        return torch.ops.liger_entropy.token_statistics.default(*arguments)
    return _Direct.apply(*arguments, started or start(*arguments))
