"""One forward of a patched model: what its head, its cross-entropy and its outputs go through."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import _reduction
from torch.nn import functional as F

from ..losses import LossOptions, compose
from ..planner import ComputeOptions
from ..token_statistics import Call, TokenStatistics
from .deferred import DeferredLogits
from .heads import DeferringHead, statistics_tuple
from .recording import Recipe


@dataclass
class Tally:
    """The entropies that training losses met since somebody last took them, on the device of the losses."""

    entropy: Tensor  # nats, summed over kept tokens
    tokens: Tensor  # their number

    @classmethod
    def on(cls, device: torch.device) -> Tally:
        return cls(torch.zeros((), device=device), torch.zeros((), dtype=torch.int64, device=device))

    def add(self, entropy: Tensor, kept: Tensor) -> None:
        self.entropy += entropy.detach().sum().to(self.entropy)  # 0 where a token is not kept
        self.tokens += kept.sum().to(self.tokens)

    def take(self) -> tuple[float, int]:
        sums = self.entropy.item(), int(self.tokens.item())
        self.entropy.zero_()
        self.tokens.zero_()
        return sums


@dataclass
class Patch:
    """What :func:`apply_liger_entropy` was told, kept on the model; ``noted`` are the reasons warned about so far."""

    entropy_coef: float = 0.0
    label_smoothing: float = 0.0
    lse_square_scale: float = 0.0
    token_statistics: bool = False
    options: ComputeOptions = field(default_factory=ComputeOptions)
    noted: set[str] = field(default_factory=set)
    extras: dict[str, Tensor] | None = None  # filled by forward for the __call__ around it
    tally: Tally | None = None  # EntropyCallback's, while a Trainer trains

    @property
    def changes_loss(self) -> bool:
        return bool(self.entropy_coef or self.label_smoothing or self.lse_square_scale)


@dataclass
class Request:
    """Asks a head, inside its own forward, for the statistics of its logits instead of the logits."""

    recipe: Recipe
    target: Tensor
    class_weight: Tensor | None
    ignore_index: int
    options: ComputeOptions
    wanted: dict[str, bool]

    def statistics(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
        recipe, (start, stop) = self.recipe, self.recipe.columns
        if start:
            weight, bias = weight[start:stop], None if bias is None else bias[start:stop]
        # outer * tanh(inner * z) is the softcap c tanh(scale z / c) with c = outer and scale = inner * outer.
        softcap, scale = (recipe.outer, recipe.inner * recipe.outer) if recipe.capped else (None, recipe.inner)
        call = Call(
            hidden, weight, self.target, bias, self.class_weight, self.ignore_index, softcap, scale, None,
            vocab_size=stop - start,
        )  # fmt: skip
        return statistics_tuple(call.statistics(self.options, **self.wanted))


class HeadCall:
    """Follows the logits of one forward from the head to the loss and the outputs."""

    def __init__(
        self,
        patch: Patch,
        model_name: str,
        fuse: bool,
        num_items: Any,
        return_token_accuracy: bool,
        use_token_scaling: bool,
    ):
        self.patch, self.model_name, self.fuse, self.num_items = patch, model_name, fuse, num_items
        self.accuracy, self.scaling = return_token_accuracy, use_token_scaling
        self.grad, self.saved_tensor_hooks = torch.is_grad_enabled(), _saved_tensor_hooks()
        self.nodes: list[DeferredLogits] = []
        self.parts: dict[str, Tensor] = {}  # of the first loss: entropy_loss, logprob, entropy, token_accuracy

    def meet(self, head: DeferringHead, args: tuple, kwargs: dict) -> Any:
        """The model calls its head. Under another grad mode, or in a checkpoint, that is an ordinary call.

        A checkpoint inside the model computes its region a second time when this call is over and nothing is followed.
        """
        hooks = _saved_tensor_hooks()
        if not self.in_grad_mode() or (() not in (hooks, self.saved_tensor_hooks) and hooks != self.saved_tensor_hooks):
            return head.call_plainly(*args, **kwargs)
        reason = head.refusal()
        if len(args) != 1 or kwargs:
            reason = "the output embedding is called with more than the hidden states"
        if self.fuse and reason is None:
            return self._defer(head, args[0])
        if reason is not None and self.fuse:
            self.note(reason)
        logits = head.call_plainly(*args, **kwargs)
        return DeferredLogits(self, value=logits) if isinstance(logits, Tensor) else logits

    def _defer(self, head: Any, hidden: Tensor) -> DeferredLogits:
        enabled, dtype = autocast = _autocast_state(hidden)
        dtype = dtype if enabled else hidden.dtype
        return DeferredLogits(self, Recipe(head, hidden, hidden.ndim - 1, (0, head.out_features), dtype, autocast))

    def in_grad_mode(self) -> bool:
        """Whether the grad mode is the one under which the model was called, and its head."""
        return torch.is_grad_enabled() == self.grad

    @contextmanager
    def grad_mode(self) -> Iterator[None]:
        with torch.inference_mode(False), torch.set_grad_enabled(self.grad):
            yield

    def logits(self, recipe: Recipe) -> Tensor:
        with _autocast(recipe):
            return recipe.head.call_plainly(recipe.hidden)  # type: ignore[operator]

    def note(self, reason: str) -> None:
        """Warn, once per model and reason (or per compilation), that the logits are computed."""
        text = f"liger_entropy: the loss of {self.model_name} is right but not fused; its logits are computed: {reason}"
        if torch.compiler.is_compiling():
            _warn_while_tracing(text)
        elif reason not in self.patch.noted:
            self.patch.noted.add(reason)
            warnings.warn(text, stacklevel=2)

    def cross_entropy(
        self,
        logits: DeferredLogits,
        target: Tensor,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Tensor:
        """F.cross_entropy met followed logits."""
        if size_average is not None or reduce is not None:
            reduction = _reduction.legacy_get_string(size_average, reduce)
        rows, axis = list(logits.shape), 1 if logits.ndim > 1 else 0
        del rows[axis]
        if target.is_floating_point() or list(target.shape) != rows:  # class probabilities, or torch's own error
            if self.patch.changes_loss:
                raise ValueError(
                    f"{self.model_name}: entropy_coef, label_smoothing and lse_square_scale need a loss on class "
                    f"indices, but it takes {target.dtype} {tuple(target.shape)} for logits {tuple(logits.shape)}"
                )
            value = logits.materialise("a loss that is not on class indices")
            return F.cross_entropy(value, target, weight, None, ignore_index, None, reduction, label_smoothing)
        options = self._options(reduction, label_smoothing)
        request = (target, weight, ignore_index, self.patch.options, options.wanted)
        statistics = self._fused(logits, axis, request) if self.fuse else None
        if statistics is None:
            statistics = self._from_logits(logits, axis, request)
        output = compose(statistics, target, options, ignore_index=ignore_index, class_weight=weight)
        if not self.parts:
            self._keep(statistics, output, options, target.long() != ignore_index)
        return output.loss

    def _options(self, reduction: str, label_smoothing: float) -> LossOptions:
        """The model's own label smoothing, where it has one, takes precedence."""
        patch = self.patch
        return LossOptions(
            reduction, label_smoothing or patch.label_smoothing, patch.lse_square_scale, patch.entropy_coef,
            return_entropy_loss=True, return_token_accuracy=self.accuracy, use_token_scaling=self.scaling,
        )  # fmt: skip

    def _fused(self, logits: DeferredLogits, axis: int, request: tuple) -> TokenStatistics | None:
        recipe = logits.usable_recipe()
        if recipe is None or recipe.axis != axis:
            return None
        hidden = recipe.hidden.movedim(axis, -1)
        recipe = replace(recipe, hidden=hidden, axis=hidden.ndim - 1)
        with _autocast(recipe):
            return TokenStatistics(*recipe.head(hidden, liger_entropy_request=Request(recipe, *request)))

    def _from_logits(self, logits: DeferredLogits, axis: int, request: tuple) -> TokenStatistics:
        target, weight, ignore_index, options, wanted = request
        value = logits.materialise("the classes are not where cross_entropy expects them").movedim(axis, -1)
        call = Call(value, None, target, None, weight, ignore_index, None, 1.0, None)
        return call.statistics(options, **wanted)

    def _keep(self, statistics: TokenStatistics, output: Any, options: LossOptions, kept: Tensor) -> None:
        """Sums are divided by the number of items where the caller gave one, as the model does with its loss."""
        entropy, accuracy = output.entropy_loss, output.token_accuracy
        if options.reduction == "sum" and self.num_items is not None:
            items = self.num_items
            entropy = entropy / (items.to(entropy.device).reshape(()) if isinstance(items, Tensor) else items)
        elif options.reduction == "none":
            entropy = entropy.sum() / kept.sum().clamp(min=1)
            accuracy = None if accuracy is None else accuracy.sum() / kept.sum().clamp(min=1)
        if self.patch.tally is not None and torch.is_grad_enabled():  # neither evaluation nor a reference's pass
            self.patch.tally.add(statistics.entropy, kept)
        self.parts = {"entropy_loss": entropy, "logprob": statistics.logprob, "entropy": statistics.entropy}
        if accuracy is not None:
            self.parts["token_accuracy"] = accuracy

    def returned(self, logits: DeferredLogits) -> Tensor | None:
        """What an output holds in place of followed logits: nothing where a fused loss made them needless."""
        return None if self.fuse and self.parts and logits.recipe is not None else logits.materialise()

    def check_loss(self, outputs: Any) -> None:
        """No cross-entropy was met. Fine where there is no loss; else it is the model's own and has no entropy."""
        if getattr(outputs, "loss", outputs) is None:
            return
        reason = (
            "it is not taken by torch.nn.functional.cross_entropy from the output embedding's logits (those made or "
            "used under another grad mode than the model's, or made in a checkpoint inside it, are not followed)"
        )
        if self.patch.changes_loss:
            raise RuntimeError(
                f"{self.model_name}: entropy_coef, label_smoothing and lse_square_scale cannot be applied to its loss, "
                f"because {reason}"
            )
        self.note(reason)


def _saved_tensor_hooks() -> Any:
    """The innermost pair, which a checkpoint sets to its own, or None; () while Dynamo traces, which cannot ask."""
    if torch.compiler.is_compiling():
        return ()
    return torch._C._autograd._top_saved_tensors_default_hooks(False)  # type: ignore[attr-defined]


def _autocast_state(hidden: Tensor) -> tuple[bool, torch.dtype]:
    device = hidden.device.type
    if device == "meta":  # no autocast is known for it
        return False, hidden.dtype
    return torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)


def _autocast(recipe: Recipe) -> AbstractContextManager:
    """As it was where the model called its head."""
    enabled, dtype = recipe.autocast
    if recipe.hidden.device.type == "meta":
        return nullcontext()
    return torch.autocast(recipe.hidden.device.type, dtype=dtype, enabled=enabled)


@torch.compiler.assume_constant_result
def _warn_while_tracing(text: str) -> None:
    warnings.warn(text, stacklevel=2)
