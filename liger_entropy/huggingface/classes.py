"""Changing one instance's behaviour by giving it a class of its own, derived from the one it has.

State dicts, other instances and isinstance are unaffected; forward stays a bound method: copy.deepcopy, accelerate's
re-binding of forward and PEFT see what they expect.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any


@functools.cache
def derived_class(mixin: type, original: type) -> type:
    """The subclass of ``mixin`` and ``original`` that carries the name of ``original``."""
    namespace: dict[str, Any] = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "__reduce_ex__": _reduce_ex,
        "_liger_entropy_classes": (mixin, original),
    }
    if hasattr(mixin, "namespace_for"):
        namespace.update(mixin.namespace_for(original))  # type: ignore[attr-defined]
    return type(original.__name__, (mixin, original), namespace)


def original_class(derived: type) -> type:
    return derived.__dict__["_liger_entropy_classes"][1]


def is_derived(cls: type) -> bool:
    return "_liger_entropy_classes" in cls.__dict__


def with_signature(forward: Callable, original: Callable) -> Callable:
    """A forward that shows the original's signature. No ``__wrapped__``: accelerate unwraps by following it."""

    def patched(self, *args, **kwargs):
        return forward(self, *args, **kwargs)

    patched.__name__, patched.__qualname__, patched.__doc__ = "forward", original.__qualname__, original.__doc__
    patched.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    return patched


def _reduce_ex(self, protocol):
    """copy and pickle find no class under this name, so they rebuild it from the original."""
    mixin, original = self._liger_entropy_classes
    _, _, *state = super(mixin, self).__reduce_ex__(max(protocol, 2))
    return _new, (mixin, original), *state


def _new(mixin: type, original: type) -> Any:
    cls = derived_class(mixin, original)
    return cls.__new__(cls)  # type: ignore[call-overload]
