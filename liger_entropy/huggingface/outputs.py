"""What a patched model gives back: logits put in place or left out, entropy and token statistics added."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .deferred import DeferredLogits

EXTRAS = ("entropy_loss", "token_logprobs", "token_entropy", "token_accuracy")


def replace_logits(outputs: Any, value_of: Callable[[DeferredLogits], Tensor | None]) -> Any:
    """``outputs`` with every followed tensor replaced; containers without one come back as they are."""
    if isinstance(outputs, DeferredLogits):
        return value_of(outputs)
    if isinstance(outputs, (tuple, list)):
        items = [replace_logits(item, value_of) for item in outputs]
        if all(new is old for new, old in zip(items, outputs, strict=True)):
            return outputs
        return type(outputs)(*items) if hasattr(outputs, "_fields") else type(outputs)(items)
    if isinstance(outputs, dict):  # a ModelOutput too; it keeps its attributes in step with its items
        for key, old in list(outputs.items()):
            new = replace_logits(old, value_of)
            if new is not old:
                _set_item(outputs, key, new)
    elif dataclasses.is_dataclass(outputs):
        for entry in dataclasses.fields(outputs):
            old = getattr(outputs, entry.name)
            new = replace_logits(old, value_of)
            if new is not old:
                setattr(outputs, entry.name, new)
    return outputs


def _set_item(outputs: Any, key: str, value: Any) -> None:
    if value is None and hasattr(outputs, key):  # a ModelOutput has no item for a field that is None
        OrderedDict.__delitem__(outputs, key)
        object.__setattr__(outputs, key, None)
    else:
        outputs[key] = value


def attach(outputs: Any, extras: dict[str, Tensor]) -> None:
    """Set the extras as attributes (as items of a plain dict).

    Attributes only: every item of a ModelOutput that is not the loss becomes a prediction in Trainer.evaluate.
    A tuple or a bare loss cannot carry them.
    """
    if type(outputs) is dict:
        outputs.update(extras)
    elif isinstance(outputs, dict) or dataclasses.is_dataclass(outputs):
        for name, value in extras.items():
            object.__setattr__(outputs, name, value)


def like_labels(values: Tensor, labels: Tensor) -> Tensor:
    """Per-token values of a loss in the labels' shape.

    As many values as labels: position for position. One less per sequence: the model cut its last position off before
    the loss, and that position is 0. Otherwise (a model that picks tokens itself) they stay as the loss had them.
    """
    if values.numel() == labels.numel():
        return values.reshape(labels.shape)
    if labels.ndim and values.numel() == labels[..., 1:].numel():
        return torch.nn.functional.pad(values.reshape(labels[..., 1:].shape), (0, 1))
    return values
