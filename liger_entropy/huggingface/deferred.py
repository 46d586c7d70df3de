"""DeferredLogits: stands for logits in model code, records what the code does, and computes them only if it must."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .recording import COMMUTATIVE, RULES, Recipe

if TYPE_CHECKING:
    from .call import HeadCall


class DeferredLogits:
    """Logits of a head that was not called yet, or (``value`` given) logits that exist but are still followed.

    Not a Tensor: Dynamo traces a plain object with ``__torch_function__``, whereas it recursed without end on a Tensor
    subclass. torch functions, tensor operators and Tensor methods all take it. What :mod:`recording` knows is
    recorded; ``F.cross_entropy`` runs the fused operator; any other operation computes the true logits, and its
    result is followed further, so that a loss taken from it still reports its entropy.
    """

    def __init__(
        self,
        call: HeadCall,
        recipe: Recipe | None = None,
        source: tuple[Callable, tuple, dict] | None = None,
        value: Tensor | None = None,
    ):
        self._call, self._recipe, self._source, self._value = call, recipe, source, value
        self._version = None if recipe is None else _version(recipe.hidden)
        call.nodes.append(self)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.cross_entropy:
            logits = args[0] if args else kwargs["input"]
            if isinstance(logits, DeferredLogits) and logits._call.in_grad_mode():
                options = {name: value for name, value in kwargs.items() if name != "input"}
                return logits._call.cross_entropy(logits, *args[1:], **options)
        return _run(func.__name__, func, args, kwargs)

    def __getattr__(self, name: str):
        if name.startswith("__") or not hasattr(Tensor, name):
            raise AttributeError(f"'DeferredLogits' object has no attribute {name!r}")
        if not callable(getattr(Tensor, name)):
            return getattr(self.materialise(f"Tensor.{name}"), name)

        def method(*args, **kwargs):
            return _run(name, getattr(Tensor, name), (self, *args), kwargs)

        return method

    def materialise(self, reason: str = "") -> Tensor:
        """The true logits: the head is called, then every recorded operation runs on its result.

        All of it under the grad mode of the head's call, whatever asks for the logits (a metric under no_grad).
        Operations keep their aliasing (a slice is a view of its source), so that in-place edits act as on tensors.
        """
        if self._value is None and not self._call.in_grad_mode():
            with self._call.grad_mode():
                return self.materialise(reason)
        if self._value is None:
            if reason:
                self._call.note(reason)
            if self._source is None:
                assert self._recipe is not None
                self._check_unchanged(self._recipe)
                self._value = self._call.logits(self._recipe)
            else:
                func, args, kwargs = self._source
                self._value = func(*_real(args), **_real(kwargs))
        return self._value

    @property
    def recipe(self) -> Recipe | None:
        """None once the logits exist: what can still happen to them in place is not in the recipe."""
        source = self._source
        sources = [] if source is None else [a for a in source[1] if isinstance(a, DeferredLogits)]
        exist = self._value is not None or any(a.recipe is None for a in sources)
        return None if exist else self._recipe

    def usable_recipe(self) -> Recipe | None:
        """The recipe, to compute with.

        Raises:
            RuntimeError: the hidden states were changed in place since.
        """
        recipe = self.recipe
        if recipe is not None:
            self._check_unchanged(recipe)
        return recipe

    def _check_unchanged(self, recipe: Recipe) -> None:
        if None not in (self._version, now := _version(recipe.hidden)) and now != self._version:
            raise RuntimeError(
                f"{self._call.model_name}: the hidden states {tuple(recipe.hidden.shape)}, from which its output "
                "embedding makes logits, were changed in place after its call; the logits were deferred until their "
                "use, and what they are made of is gone: change a copy of the hidden states, or call with "
                "skip_logits=False"
            )

    @property
    def shape(self) -> torch.Size:
        return self._recipe.shape if self._value is None and self._recipe else self.materialise().shape

    @property
    def dtype(self) -> torch.dtype:
        return self._recipe.dtype if self._value is None and self._recipe else self.materialise().dtype

    @property
    def device(self) -> torch.device:
        return self._recipe.hidden.device if self._value is None and self._recipe else self.materialise().device

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def dim(self) -> int:
        return len(self.shape)

    def size(self, dim: int | None = None):
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        return self.shape.numel()

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"DeferredLogits(shape={tuple(self.shape)}, dtype={self.dtype})"

    __hash__ = object.__hash__


def _version(tensor: Tensor) -> int | None:
    """Changes with every in-place operation; None for inference tensors, which count none, and while Dynamo traces."""
    return None if torch.compiler.is_compiling() or tensor.is_inference() else tensor._version


def _run(name: str, func: Callable, args: tuple, kwargs: dict) -> Any:
    recorded = _record(name, func, args, kwargs)
    return _compute(name, func, args, kwargs) if recorded is None else recorded


def _record(name: str, func: Callable, args: tuple, kwargs: dict) -> DeferredLogits | None:
    rule = RULES.get(name)
    logits, *rest = reversed(args) if name in COMMUTATIVE and not isinstance(args[0], DeferredLogits) else args
    if rule is None or not isinstance(logits, DeferredLogits) or any(isinstance(a, DeferredLogits) for a in rest):
        return None
    recipe = logits.usable_recipe() if logits._call.in_grad_mode() else None
    if recipe is not None:
        try:
            recipe = rule(recipe, *rest, **kwargs)
        except Exception:  # arguments the rule does not take: the true operation decides, and raises what it raises
            recipe = None
    return None if recipe is None else DeferredLogits(logits._call, recipe, (func, args, kwargs))


def _compute(name: str, func: Callable, args: tuple, kwargs: dict) -> Any:
    found = _deferred((args, kwargs))
    assert found is not None
    if _in_place(name, kwargs):
        for node in list(found._call.nodes):  # while they still hold what they held
            node.materialise(f"the in-place operation {name}")
    found.materialise(f"the operation {name}")
    return _follow(found._call, func(*_real(args), **_real(kwargs)))


def _in_place(name: str, kwargs: dict) -> bool:
    edits = name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))
    return edits or kwargs.get("out") is not None or kwargs.get("inplace") is True


def _deferred(value: Any) -> DeferredLogits | None:
    if isinstance(value, DeferredLogits):
        return value
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    for item in items:
        found = _deferred(item)
        if found is not None:
            return found
    return None


def _real(value: Any) -> Any:
    if isinstance(value, DeferredLogits):
        return value.materialise()
    if isinstance(value, dict):
        return {key: _real(item) for key, item in value.items()}
    return type(value)([_real(item) for item in value]) if type(value) in (tuple, list) else value


def _follow(call: HeadCall, result: Any) -> Any:
    if isinstance(result, Tensor) and result.is_floating_point():
        return DeferredLogits(call, value=result)
    return type(result)([_follow(call, item) for item in result]) if type(result) in (tuple, list) else result


def _operator(name: str):
    def method(self, *args):
        return _run(name, getattr(Tensor, name), (self, *args), {})

    method.__name__ = name
    return method


_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor")
_IN_PLACE = {f"__i{name}__" for name in _BINARY if hasattr(Tensor, f"__i{name}__")} | {"__setitem__"}
_OTHERS = ("neg", "pos", "abs", "invert", "eq", "ne", "lt", "le", "gt", "ge", "getitem", "iter", "contains", "array")
_CONVERSIONS = ("bool", "float", "int", "index", "complex")
for _name in (
    *(f"__{side}{name}__" for name in _BINARY for side in ("", "r")),
    *(f"__{name}__" for name in _OTHERS + _CONVERSIONS),
    *_IN_PLACE,
):
    if hasattr(Tensor, _name):
        setattr(DeferredLogits, _name, _operator(_name))
