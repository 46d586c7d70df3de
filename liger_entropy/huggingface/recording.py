"""What model code does to logits, recorded on the hidden states instead.

A :class:`Recipe` describes logits that do not exist: ``transform(hidden weight[columns]^T + bias[columns])``. Every
rule takes a recipe and the arguments of one torch function and gives the recipe of the result, or None where the
function is not one that a recipe can express.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Recipe:
    """Logits in the layout of ``hidden``, whose dimension ``axis`` stands for the classes."""

    head: nn.Module  # the module that makes them, nn.Linear's forward
    hidden: Tensor  # [..., D, ...], D at axis
    axis: int
    columns: tuple[int, int]  # the classes taken, [start, stop)
    dtype: torch.dtype
    autocast: tuple[bool, torch.dtype]  # where the model called its head
    inner: float = 1.0  # z = outer * tanh(inner * logits) if capped, else inner * logits
    outer: float = 1.0
    capped: bool = False

    @property
    def classes(self) -> int:
        return self.columns[1] - self.columns[0]

    @property
    def shape(self) -> torch.Size:
        shape = list(self.hidden.shape)
        shape[self.axis] = self.classes
        return torch.Size(shape)

    def at_last(self) -> bool:
        return self.axis == self.hidden.ndim - 1


Rule = Callable[..., "Recipe | None"]


def multiply(recipe: Recipe, factor: Any) -> Recipe | None:
    if isinstance(factor, Tensor):
        if factor.ndim or recipe.capped or recipe.head.bias is not None or not factor.is_floating_point():
            return None
        return replace(recipe, hidden=recipe.hidden * factor)  # keeps the gradient of a learned scale
    if isinstance(factor, bool) or not isinstance(factor, (int, float)):
        return None
    if not (math.isfinite(factor) and factor > 0):
        return None
    if recipe.capped:
        return replace(recipe, outer=recipe.outer * factor)
    return replace(recipe, inner=recipe.inner * factor)


def divide(recipe: Recipe, divisor: Any) -> Recipe | None:
    if isinstance(divisor, Tensor):
        return multiply(recipe, 1.0 / divisor)
    if isinstance(divisor, (int, float)) and not isinstance(divisor, bool) and divisor != 0:
        return multiply(recipe, 1.0 / divisor)
    return None


def tanh(recipe: Recipe) -> Recipe | None:
    return None if recipe.capped else replace(recipe, capped=True)


def cast(recipe: Recipe, *targets: Any, **kwargs: Any) -> Recipe | None:
    """``.to(...)``: dtypes are recorded, a device must be the one the hidden states are on."""
    for target in (*targets, *(value for key, value in kwargs.items() if key != "non_blocking")):
        if isinstance(target, torch.dtype):
            if not target.is_floating_point:
                return None
            recipe = replace(recipe, dtype=target)
        elif isinstance(target, (str, torch.device)):
            if torch.device(target) != recipe.hidden.device:
                return None
        else:
            return None
    return recipe


def retype(recipe: Recipe, dtype: Any) -> Recipe | None:
    return cast(recipe, dtype) if isinstance(dtype, torch.dtype) else None


def same(recipe: Recipe) -> Recipe:
    return recipe


def reshape(recipe: Recipe, *sizes: Any, shape: Any = None) -> Recipe | None:
    if shape is not None:
        sizes = tuple(shape)
    elif len(sizes) == 1 and isinstance(sizes[0], (tuple, list)):
        sizes = tuple(sizes[0])
    if not recipe.at_last() or not sizes or isinstance(sizes[0], torch.dtype):
        return None
    *rows, last = sizes
    if last == -1 and math.prod(rows) != math.prod(recipe.shape[:-1]):
        return None
    if last not in (-1, recipe.classes):
        return None
    return replace(recipe, hidden=recipe.hidden.reshape(*rows, recipe.hidden.shape[-1]), axis=len(rows))


def flatten(recipe: Recipe, start_dim: int = 0, end_dim: int = -1) -> Recipe | None:
    last = recipe.hidden.ndim - 1
    start, end = start_dim % (last + 1), end_dim % (last + 1)
    if not recipe.at_last() or end >= last or end < start:
        return None
    return replace(recipe, hidden=recipe.hidden.flatten(start, end), axis=last - (end - start))


def transpose(recipe: Recipe, dim0: int, dim1: int) -> Recipe | None:
    ndim = recipe.hidden.ndim
    first, second = dim0 % ndim, dim1 % ndim
    axis = {first: second, second: first}.get(recipe.axis, recipe.axis)
    return replace(recipe, hidden=recipe.hidden.transpose(first, second), axis=axis)


def permute(recipe: Recipe, *dims: Any) -> Recipe | None:
    if len(dims) == 1 and isinstance(dims[0], (tuple, list)):
        dims = tuple(dims[0])
    order = [dim % recipe.hidden.ndim for dim in dims]
    return replace(recipe, hidden=recipe.hidden.permute(order), axis=order.index(recipe.axis))


def unsqueeze(recipe: Recipe, dim: int) -> Recipe | None:
    where = dim % (recipe.hidden.ndim + 1)
    return replace(recipe, hidden=recipe.hidden.unsqueeze(where), axis=recipe.axis + (where <= recipe.axis))


def squeeze(recipe: Recipe, dim: Any = None) -> Recipe | None:
    if not isinstance(dim, int) or dim % recipe.hidden.ndim == recipe.axis:
        return None
    where = dim % recipe.hidden.ndim
    gone = recipe.hidden.shape[where] == 1 and where < recipe.axis
    return replace(recipe, hidden=recipe.hidden.squeeze(where), axis=recipe.axis - gone)


def index(recipe: Recipe, key: Any) -> Recipe | None:
    """Rows by ints, slices, one mask or index tensor; classes by a slice of step 1."""
    keys = _expanded(key if isinstance(key, tuple) else (key,), recipe.hidden.ndim)
    if keys is None or not recipe.at_last():
        return None
    *rows, last = keys
    if not isinstance(last, slice) or sum(isinstance(k, Tensor) for k in rows) > 1:
        return None
    if not all(k is None or (isinstance(k, (int, slice, Tensor)) and not isinstance(k, bool)) for k in rows):
        return None
    start, stop, step = last.indices(recipe.classes)
    if step != 1 or stop <= start:
        return None
    hidden = recipe.hidden[(*rows, slice(None))]
    first = recipe.columns[0]
    return replace(recipe, hidden=hidden, axis=hidden.ndim - 1, columns=(first + start, first + stop))


def _expanded(keys: tuple, ndim: int) -> tuple | None:
    """The index with its ellipsis written out and full slices up to the last dimension; None: it does not fit."""
    used = sum(k.ndim if _is_mask(k) else k is not None and k is not Ellipsis for k in keys)
    fill = (slice(None),) * (ndim - used)
    for position, k in enumerate(keys):
        if k is Ellipsis:
            keys = (*keys[:position], *fill, *keys[position + 1 :])
            break
    else:
        keys = (*keys, *fill)
    return None if used > ndim or any(k is Ellipsis for k in keys) else keys


def _is_mask(key: Any) -> bool:
    return isinstance(key, Tensor) and key.dtype in (torch.bool, torch.uint8)


def _to(dtype: torch.dtype) -> Rule:
    return lambda recipe: replace(recipe, dtype=dtype)


def type_as(recipe: Recipe, other: Tensor) -> Recipe | None:
    return cast(recipe, other.dtype, other.device)


# By the name of the torch function or method; the commutative ones may have the logits as second argument.
COMMUTATIVE: dict[str, Rule] = dict.fromkeys(("mul", "multiply", "__mul__", "__rmul__"), multiply)
RULES: dict[str, Rule] = {
    **COMMUTATIVE,
    **dict.fromkeys(("div", "divide", "true_divide", "__truediv__"), divide),
    **dict.fromkeys(("view", "reshape"), reshape),
    **dict.fromkeys(("transpose", "swapaxes", "swapdims"), transpose),
    **dict.fromkeys(("contiguous", "clone"), same),
    "tanh": tanh,
    "to": cast,
    "type": retype,
    "type_as": type_as,
    "float": _to(torch.float32),
    "double": _to(torch.float64),
    "half": _to(torch.float16),
    "bfloat16": _to(torch.bfloat16),
    "flatten": flatten,
    "permute": permute,
    "unsqueeze": unsqueeze,
    "squeeze": squeeze,
    "__getitem__": index,
}
