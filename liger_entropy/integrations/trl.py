"""TRL's trainers on the token-statistics operator.

From 1.16 on, every TRL trainer that needs per-token log-probabilities (SFT, GRPO, RLOO, DPO, KTO) takes them from
``model(..., labels=labels, fused_lm_head=True)``, which ``trl.trainer.utils.add_fused_lm_head`` gives the model.
:func:`apply_to_trl` puts the one below in its place. TRL's reads the scale and softcap of the logits from names in the
config; this one runs the model's own forward and follows what it does to its logits.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import inspect
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..huggingface.call import HeadCall, Patch
from ..huggingface.deferred import DeferredLogits
from ..huggingface.heads import candidates, defer, find_head
from ..planner import ComputeOptions
from ..token_statistics import TokenStatistics
from .substitution import Substitution

_HOME = "trl.trainer.utils"
_ARGUMENTS = ["model", "temperature", "cast_lm_head_to_fp32", "outputs"]
_FIELDS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
_active: Substitution | None = None


def apply_to_trl(options: ComputeOptions | None = None) -> None:
    """Make every TRL trainer that is constructed from now on use the operator; nothing else changes.

    Log-probabilities, entropies (both differentiable), losses and metrics are what the trainer would have computed.
    Options of the trainers (temperature, entropy_coef, top_entropy_quantile, use_adaptive_entropy, loss types, PEFT,
    ``use_liger_kernel=True``, which TRL reduces to Liger's layer kernels) work as they did. Acts on the current
    process; calling it again replaces the options.

    Raises:
        ImportError: TRL is not installed.
        RuntimeError: a TRL without ``add_fused_lm_head`` (before 1.16), or with other arguments to it.
    """
    global _active
    remove_from_trl()
    home = importlib.import_module(_HOME)
    version = importlib.metadata.version("trl")
    if not hasattr(home, "add_fused_lm_head"):
        raise RuntimeError(f"trl {version} has no {_HOME}.add_fused_lm_head; apply_to_trl needs trl 1.16 or newer")
    arguments = list(inspect.signature(home.add_fused_lm_head).parameters)
    if arguments != _ARGUMENTS:
        raise RuntimeError(f"trl {version}: its add_fused_lm_head takes {arguments}, expected {_ARGUMENTS}")
    _active = Substitution(home, "add_fused_lm_head", functools.partial(add_fused_lm_head, options=options))


def remove_from_trl() -> None:
    """Undo :func:`apply_to_trl` for trainers constructed from now on; nothing happens if it was not applied."""
    global _active
    if _active is not None:
        _active.undo()
        _active = None


def add_fused_lm_head(
    model: nn.Module,
    temperature: float = 1.0,
    cast_lm_head_to_fp32: bool = False,
    outputs: tuple[str, ...] = ("log_probs",),
    *,
    options: ComputeOptions | None = None,
) -> None:
    """Give ``model`` TRL's ``forward(..., labels=..., fused_lm_head=True)``; without the flag its forward is unchanged.

    The flag returns TRL's ``FusedCausalLMOutput``: ``[B, S - 1]`` per-token fields (``[B, S]`` with ``shift_labels``),
    0 where the label is -100. log_probs and entropy are fp32, in nats, and differentiable; the other fields carry no
    gradient. The logits are divided by ``temperature`` after everything the model does to them.

    Args:
        model: a causal language model, not wrapped by PEFT.
        temperature: > 0.
        cast_lm_head_to_fp32: multiply fp32 hidden states with the head, which TRL has cast to fp32, outside autocast.
        outputs: the per-token fields wanted beside log_probs, of ``"entropy"``, ``"log_sum_sq_probs"``,
            ``"mean_logits"`` and ``"is_top1"``; the others are None. log_sum_sq_probs costs a second forward pass.
        options: :class:`liger_entropy.ComputeOptions`.

    Raises:
        ValueError: an unknown field, a temperature that is not positive, or a model on which apply_liger_entropy has
            set a loss of its own, which TRL would pass by.
        TypeError: a model without one output embedding.
    """
    unknown = [name for name in outputs if name not in _FIELDS]
    if unknown:
        raise ValueError(f"outputs: expected names among {_FIELDS}, got {unknown[0]!r}")
    if not temperature > 0:
        raise ValueError(f"temperature: expected a number > 0, got {temperature}")
    own = getattr(model, "_liger_entropy", None)
    if own is not None and own.changes_loss:
        raise ValueError(
            "model: apply_liger_entropy has set entropy_coef, label_smoothing or lse_square_scale, but TRL makes the "
            "loss itself; set them to 0 there and use the trainer's own options (GRPOConfig.entropy_coef)"
        )
    head = find_head(model)
    if cast_lm_head_to_fp32:
        _cast_inputs(head)
    for module in candidates(head):
        defer(module)
    fused = _FusedForward(temperature, cast_lm_head_to_fp32, outputs, Patch(options=options or ComputeOptions()))
    _replace_forward(model, fused)


def _replace_forward(model: nn.Module, fused: _FusedForward) -> None:
    """Keeps what stood in its place on the instance: None for the class's, which remove_liger_entropy may change.

    It is looked up in ``self``, which in a copy of the model is the copy.
    """
    replaced = model.__dict__.setdefault("_liger_entropy_replaced", [])
    level = len(replaced)
    replaced.append(model.__dict__.get("forward"))

    @functools.wraps(type(model).forward)  # generate reads the signature
    def forward(self, *args, fused_lm_head=False, labels=None, shift_labels=None, num_items_in_batch=None, **kwargs):
        original = self._liger_entropy_replaced[level] or types.MethodType(type(self).forward, self)
        given = {"labels": labels, "shift_labels": shift_labels, "num_items_in_batch": num_items_in_batch}
        if fused_lm_head:
            return fused(self, original, args, kwargs, **given)
        return original(*args, **{name: value for name, value in given.items() if value is not None}, **kwargs)

    model.forward = types.MethodType(forward, model)


def _cast_inputs(head: nn.Module) -> None:
    """TRL has given the fp32 head a forward of its own; the same as a hook leaves it an nn.Linear to the operator."""
    head.__dict__.pop("forward", None)
    head.register_forward_pre_hook(lambda module, args: (args[0].float(), *args[1:]))


class _Fp32HeadCall(HeadCall):
    """The head meets fp32 hidden states outside autocast."""

    def meet(self, head: Any, args: tuple, kwargs: dict) -> DeferredLogits:
        with torch.autocast(args[0].device.type, enabled=False):
            return super().meet(head, (args[0].float(), *args[1:]), kwargs)


@dataclass
class _FusedForward:
    """``forward(..., fused_lm_head=True)`` of one model."""

    temperature: float
    fp32: bool
    outputs: tuple[str, ...]
    patch: Patch

    def __call__(
        self,
        model: Any,
        forward: Any,
        args: tuple,
        kwargs: dict,
        labels: Any,
        shift_labels: Any,
        num_items_in_batch: Any,
    ) -> Any:
        if labels is None and shift_labels is None:
            raise ValueError("fused_lm_head: expected labels or shift_labels, got neither")
        kwargs["use_cache"] = False
        config = model.config.get_text_config()
        if getattr(config, "output_router_logits", False):
            kwargs.setdefault("output_router_logits", True)
        call = (_Fp32HeadCall if self.fp32 else HeadCall)(self.patch, type(model).__name__, True, None, False, False)
        with _followed(model, call):
            results = forward(*args, **kwargs)
        logits, target = results.logits, shift_labels
        if labels is not None and shift_labels is None:
            logits, target = logits[:, :-1], labels[:, 1:]
        target = target.to(logits.device)
        fields = self._fields(call, logits / self.temperature, target)
        loss, aux_loss = _loss(fields["log_probs"], target, num_items_in_batch), getattr(results, "aux_loss", None)
        if aux_loss is not None:
            loss = loss + getattr(config, "router_aux_loss_coef", 0.0) * aux_loss
        output = importlib.import_module(_HOME).FusedCausalLMOutput
        return output(loss=loss, label_mask=_kept(target), aux_loss=aux_loss, **fields)

    def _fields(self, call: HeadCall, logits: Any, target: Tensor) -> dict[str, Tensor]:
        entropy, squares, mean, top1 = (name in self.outputs for name in _FIELDS[1:])
        statistics = self._statistics(call, logits, target, entropy=entropy, smooth=mean, prediction=top1)
        fields = {"log_probs": statistics.logprob}
        if entropy:
            fields["entropy"] = statistics.entropy
        if mean:  # 1/V sum_j log p_j = mean_j z_j - lse
            fields["mean_logits"] = (statistics.smooth_logprob + statistics.lse).detach()
        if top1:
            fields["is_top1"] = (statistics.prediction == target) & _kept(target)
        if squares:  # log sum_j p_j^2 = log sum_j e^(2 z_j) - 2 log sum_j e^(z_j)
            with torch.no_grad():
                doubled = self._statistics(call, logits * 2.0, target, entropy=False, smooth=False, prediction=False)
                fields["log_sum_sq_probs"] = doubled.lse - 2.0 * statistics.lse
        return fields

    def _statistics(self, call: HeadCall, logits: Any, target: Tensor, **wanted: bool) -> TokenStatistics:
        """From the hidden states where the logits were only followed, else from the logits, as the model made them."""
        request = (target, None, -100, self.patch.options, wanted)
        if not isinstance(logits, DeferredLogits):
            logits = DeferredLogits(call, value=logits)
        fused = call._fused(logits, logits.ndim - 1, request)
        return call._from_logits(logits, logits.ndim - 1, request) if fused is None else fused


@contextmanager
def _followed(model: nn.Module, call: HeadCall) -> Iterator[None]:
    """The head, looked up at every call since FSDP and PEFT replace it, hands its logits to ``call``."""
    heads: list[Any] = candidates(find_head(model))
    for head in heads:
        defer(head)
        head._liger_entropy_call = call
    try:
        yield
    finally:
        for head in heads:
            head._liger_entropy_call = None


class EntropyTerm:
    """Mixin for TRL's SFTTrainer, which has no entropy option: ``loss - entropy_coef * H`` in training::

        class EntropySFTTrainer(EntropyTerm, SFTTrainer):
            entropy_coef = 0.01

    H is the entropy (nats) of the tokens that carry loss, divided as the loss is: by ``num_items_in_batch``. Evaluation
    and the ``entropy`` metric are the trainer's.

    Raises:
        RuntimeError: a training step whose forward gives no differentiable entropies (a ``compute_loss_func``, label
            smoothing).
    """

    entropy_coef: float = 0.0

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        seen = []
        hook = model.register_forward_hook(lambda module, args, outputs: seen.append(outputs))
        try:
            result = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)  # type: ignore[misc]
        finally:
            hook.remove()
        if not self.model.training or self.entropy_coef == 0:  # type: ignore[attr-defined]
            return result
        term = self.entropy_coef * self._entropy(seen, num_items_in_batch)
        return (result[0] - term, *result[1:]) if return_outputs else result - term

    def _entropy(self, seen: list[Any], num_items: Any) -> Tensor:
        fused = [o for o in seen if getattr(o, "entropy", None) is not None and o.entropy.requires_grad]
        if not fused:
            raise RuntimeError("entropy_coef: the trainer's loss was not made from a forward that gives entropies")
        entropy, mask = fused[0].entropy.sum(), fused[0].label_mask
        if num_items is None:
            return entropy / mask.sum().clamp(min=1)
        ranks = self.accelerator.num_processes // self.get_tp_size()  # type: ignore[attr-defined]
        return entropy / num_items * (ranks if self.args.average_tokens_across_devices else 1)  # type: ignore[attr-defined]


def _kept(target: Tensor) -> Tensor:
    return target.long() != -100  # in uint8 -100 is the label 156


def _loss(log_probs: Tensor, target: Tensor, num_items: Any) -> Tensor:
    count = _kept(target).sum().clamp(min=1) if num_items is None else num_items
    return -log_probs.sum() / (count.to(log_probs.device) if isinstance(count, Tensor) else count)
