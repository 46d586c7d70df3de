"""The output embedding of a patched model: how it is found, when it may be deferred, and what it does then."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from .classes import derived_class
from .parallel import lays_out, lays_out_logits, statistics_call, style_of

if TYPE_CHECKING:
    from .call import HeadCall, Request

# Hooks of these packages gather and reshard parameters around a call; they leave its result as it is.
_SHARDING = ("torch.distributed.fsdp", "torch.distributed._composable", "deepspeed")


class DeferringHead:
    """Mixin for the class of an output embedding. Outside a patched model's loss it is an ordinary call.

    During one, ``__call__`` hands back deferred logits before any hook runs. The operator later runs in a call of its
    own, with ``liger_entropy_request``: hooks that gather a sharded weight see an ordinary forward of this module,
    and the weight is read inside it.
    """

    _liger_entropy_call: HeadCall | None = None
    _liger_entropy_linear: bool  # the class has nn.Linear's forward

    @staticmethod
    def namespace_for(original: Any) -> dict[str, Any]:
        return {"_liger_entropy_linear": original.forward is nn.Linear.forward}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = self._liger_entropy_call
        if "liger_entropy_request" in kwargs and lays_out(self):  # type: ignore[arg-type]
            with statistics_call(self, args[0]) as hidden:  # type: ignore[arg-type]
                return self.call_plainly(hidden, **kwargs)
        if call is None or "liger_entropy_request" in kwargs:
            return self.call_plainly(*args, **kwargs)
        return call.meet(self, args, kwargs)

    def call_plainly(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs)  # type: ignore[misc]

    def forward(self, *args: Any, liger_entropy_request: Request | None = None, **kwargs: Any) -> Any:
        if liger_entropy_request is None:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        return liger_entropy_request.statistics(args[0], self.weight, self.bias)  # type: ignore[attr-defined]

    def refusal(self) -> str | None:
        """Why the logits of this module are not ``input weight^T + bias``, or None."""
        assert isinstance(self, nn.Module)
        name = type(self).__name__
        if not isinstance(self, nn.Linear):
            return f"the output embedding is a {name}, not an nn.Linear"
        if not self._liger_entropy_linear or ("forward" in self.__dict__ and style_of(self) is None):
            return f"the output embedding ({name}) has a forward of its own"
        if any(not (_gathers(hook) or lays_out_logits(hook)) for hook in self._forward_hooks.values()):
            return "the output embedding has a forward hook, which must see logits"
        if not all(_gathers(hook) for hook in torch_module._global_forward_hooks.values()):
            return "there is a forward hook on all modules, which must see logits"
        return None


def _gathers(hook: Any) -> bool:
    hook = getattr(hook, "func", hook)  # functools.partial
    return str(getattr(hook, "__module__", "")).startswith(_SHARDING)


def defer(head: nn.Module) -> None:
    """Give the head the class that can defer; the weights, their names and every isinstance stay."""
    if not isinstance(head, DeferringHead):
        head.__class__ = derived_class(DeferringHead, type(head))
        # Set from the start: torch.compile would compile again when the attribute appears after the first call.
        head._liger_entropy_call = None  # type: ignore[assignment]


def candidates(head: nn.Module) -> list[nn.Module]:
    """The modules one of which makes the logits: PEFT's modules_to_save wrapper calls its copy, or the original."""
    if isinstance(getattr(head, "modules_to_save", None), nn.ModuleDict) and hasattr(head, "original_module"):
        return [head.original_module, *head.modules_to_save.values()]  # type: ignore[union-attr, operator, list-item]
    return [head]


def find_head(model: nn.Module) -> nn.Module:
    """The output embedding: what the model says, else ``lm_head``, else the one nn.Linear onto the vocabulary.

    Raises:
        TypeError: there is none, or it is not one module that is called on hidden states.
    """
    head = _stated_head(model)
    if head is None:
        head = _only_vocabulary_linear(model)
    name = type(model).__name__
    if head is None:
        raise TypeError(
            f"model: {name} has no output embedding (get_output_embeddings() gives None, there is no lm_head and no "
            "single nn.Linear onto the vocabulary), so it makes no logits whose loss could be fused"
        )
    if isinstance(head, (nn.ModuleList, nn.ModuleDict, nn.Embedding)) or not isinstance(head, nn.Module):
        raise TypeError(
            f"model: the output embedding of {name} is a {type(head).__name__}; expected one module that is called on "
            "the hidden states and gives the logits"
        )
    return head


def _stated_head(model: nn.Module) -> Any:
    getter = getattr(model, "get_output_embeddings", None)
    stated = getter() if callable(getter) else None
    return getattr(model, "lm_head", None) if stated is None else stated


def _only_vocabulary_linear(model: nn.Module) -> nn.Module | None:
    config: Any = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    size = getattr(config, "vocab_size", None)
    found = [m for m in model.modules() if isinstance(m, nn.Linear) and m.out_features == size]
    return found[0] if len(found) == 1 else None


def statistics_tuple(statistics: Any) -> tuple[Tensor, ...]:
    """A plain tuple: the hooks of FSDP and ZeRO look for tensors in tuples, lists and dicts."""
    s = statistics
    return s.logprob, s.entropy, s.lse, s.smooth_logprob, s.prediction
