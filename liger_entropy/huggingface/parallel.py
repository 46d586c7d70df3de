"""Output embeddings that tensor parallelism shards over the vocabulary: what it does around their forward.

torch's ``parallelize_module``, and the ``tp_plan`` of transformers 4, lay inputs out in a forward pre-hook and logits
in a forward hook; the ``tp_plan`` of transformers 5 does both in a forward that it puts on the instance. Statistics
come out whole on every rank, so a call that makes them keeps what is done to the input and passes by what is done to
the logits.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from ..dtensor import is_dtensor

_HOOKS = ("torch.distributed.tensor", "transformers.integrations.tensor_parallel")


def lays_out_logits(hook: Any) -> bool:
    """A forward hook of torch.distributed.tensor.parallel, or of transformers 4."""
    return str(getattr(hook, "__module__", "")).startswith(_HOOKS)


def style_of(head: nn.Module) -> Any:
    """transformers' parallel style whose forward the instance has; None if it has none or another's."""
    forward: Any = head.__dict__.get("forward")
    if getattr(forward, "__module__", None) != "transformers.distributed.tensor_parallel":
        return None
    style = inspect.getclosurevars(forward).nonlocals.get("self")
    return style if hasattr(style, "transform_inputs_pre_forward") and is_dtensor(head.weight) else None


def lays_out(head: nn.Module) -> bool:
    return style_of(head) is not None or any(map(lays_out_logits, head._forward_hooks.values()))


@contextmanager
def statistics_call(head: nn.Module, hidden: Tensor) -> Iterator[Tensor]:
    """The hidden states as the head's class must get them. Inside, nothing lays out what the head returns."""
    hooks, style = head._forward_hooks, style_of(head)
    head._forward_hooks = OrderedDict((key, hook) for key, hook in hooks.items() if not lays_out_logits(hook))
    forward = None
    if style is not None:
        weight: Any = head.weight
        (hidden,), _ = style.transform_inputs_pre_forward(head, (hidden,), {}, weight.device_mesh)
        forward = head.__dict__.pop("forward")
    try:
        yield hidden
    finally:
        head._forward_hooks = hooks
        if forward is not None:
            head.__dict__["forward"] = forward
