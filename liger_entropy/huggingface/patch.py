"""apply_liger_entropy: make a causal language model compute its loss, and the entropy, without logits."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import torch
from torch import Tensor, nn

from ..losses import LossOptions
from ..planner import ComputeOptions
from .call import HeadCall, Patch
from .classes import derived_class, is_derived, original_class, with_signature
from .heads import DeferringHead, candidates, defer, find_head
from .liger_kernels import apply_layer_kernels, has_layer_kernels, remove_layer_kernels
from .outputs import attach, like_labels, replace_logits

# Arguments that ask for a loss; shift_labels first, since they are what it sees. A forward that has none of them may
# compute one at any call.
_LABELS = ("shift_labels", "labels", "targets", "target")


def apply_liger_entropy(
    model: nn.Module,
    *,
    entropy_coef: float = 0.0,
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    token_statistics: bool = False,
    liger_kernels: bool = False,
    options: ComputeOptions | None = None,
) -> nn.Module:
    """Patch this instance, in place, and return it.

    The model's own forward runs. What its code does to the logits (scale, softcap, cast, slice, shift) is recorded, and
    where they meet ``F.cross_entropy`` the fused operator runs instead, inside a call of the output embedding. Code
    that does anything else to them gets the true logits: the loss is then right but not fused, and a warning says why,
    once. Without labels nothing changes. Works on any module that calls ``lm_head`` (or what
    ``get_output_embeddings()`` gives) and takes its loss from ``F.cross_entropy`` or ``nn.CrossEntropyLoss``; PEFT, DDP
    and ``torch.compile`` may come before or after. ``torch.compile`` traces through the patch: a model that compiles
    without graph breaks still does.

    Args:
        model: a causal language model, or a wrapper (PEFT, DDP, ``torch.compile``) of one.
        entropy_coef: the loss becomes ``CE + lse_square_scale lse^2 - entropy_coef H``, H in nats; in training and in
            eval, with the model's own rule for means and ``num_items_in_batch`` applied to every part.
        label_smoothing: used where the model's own loss has none.
        lse_square_scale: see entropy_coef.
        token_statistics: also give ``outputs.token_logprobs`` and ``outputs.token_entropy``: fp32, nats,
            differentiable, shaped like the labels. Position t speaks of label t+1, the last is 0; with
            ``shift_labels`` positions are as given. Ignored positions are 0.
        liger_kernels: also apply Liger's RMSNorm, RoPE and SwiGLU (GeGLU) kernels, to this instance only, where a CUDA
            device and a supported family allow; elsewhere a warning says that nothing was done. They overwrite
            what they saved, so that a graph takes one backward only; ``nn.DataParallel`` is refused.
        options: :class:`ComputeOptions`.

    The patched forward also takes
        skip_logits: True: ``outputs.logits`` is None; False: the logits, which are then computed. Default: True in
            training mode, False in eval mode. Where the loss was not fused the logits exist and are given.
        return_token_accuracy: True: ``outputs.token_accuracy``, the fraction of kept tokens predicted right.
        use_token_scaling: True: each token's loss is scaled by its detached probability, as in Liger.

    ``outputs.entropy_loss`` is H under the reduction of the model's loss, a differentiable fp32 scalar, on every output
    that has a loss from ``F.cross_entropy`` (of the first, where there are several). It is an attribute, not an item;
    a tuple (``return_dict=False``) has none, and ``nn.DataParallel``, which gathers items only, drops it and the token
    statistics; :class:`EntropyCallback` logs the entropy there too.

    Raises:
        TypeError: the model has no output embedding to fuse (an encoder, a bare layer, several heads in a list).
        ValueError: options out of range, or a forward that was replaced on the instance beforehand (by
            ``accelerator.prepare`` or a device map): patch first.
    """
    LossOptions("mean", label_smoothing, lse_square_scale, entropy_coef)  # raises for values out of range
    target = _unwrapped(model)
    head = find_head(target)
    if "forward" in target.__dict__:
        raise ValueError(
            f"model: forward was already replaced on this {type(target).__name__} (accelerator.prepare, a device map "
            "over several devices, or another patch), which would bypass this one: call apply_liger_entropy before that"
        )
    patch = Patch(entropy_coef, label_smoothing, lse_square_scale, token_statistics, options or ComputeOptions())
    target._liger_entropy = patch  # type: ignore[assignment]
    if not isinstance(target, PatchedModel):
        target.__class__ = derived_class(PatchedModel, type(target))
    for module in candidates(head):
        defer(module)
    remove_layer_kernels(target)
    if liger_kernels:
        apply_layer_kernels(target)
    return model


def remove_liger_entropy(model: nn.Module) -> nn.Module:
    """Undo :func:`apply_liger_entropy` on this instance and return it; a model that is not patched comes back as it is.

    Liger's layer kernels, if they were applied, go too.

    Raises:
        ValueError: ``fully_shard`` changed the class after the patch; remove the patch before sharding.
    """
    patched = [m for m in model.modules() if isinstance(m, (PatchedModel, DeferringHead))]
    for module in patched:
        if not is_derived(type(module)):
            raise ValueError(
                f"model: the class of {type(module).__name__} was changed after apply_liger_entropy (by fully_shard?); "
                "remove the patch before that"
            )
    for module in patched:
        remove_layer_kernels(module)
        module.__dict__.pop("_liger_entropy", None)
        module.__dict__.pop("_liger_entropy_call", None)
        module.__class__ = original_class(type(module))
    return model


def is_patched(model: nn.Module) -> bool:
    """Whether this model, or the one it wraps, goes through liger_entropy."""
    return any(isinstance(module, PatchedModel) for module in model.modules())


def _unwrapped(model: nn.Module) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    while True:
        base = getattr(model, "get_base_model", None)  # PEFT
        wrapped = (model._modules.get(name) for name in ("_orig_mod", "module", "_fsdp_wrapped_module"))
        inner = base() if callable(base) else next((m for m in wrapped if m is not None), None)
        if not isinstance(inner, nn.Module):
            return model
        model = inner


class PatchedModel:
    """Mixin for the class of a patched model."""

    _liger_entropy: Patch
    _liger_entropy_parameters: tuple[str, ...]

    @staticmethod
    def namespace_for(original: Any) -> dict[str, Any]:
        forward = with_signature(PatchedModel.forward, original.forward)
        parameters = tuple(inspect.signature(original.forward).parameters)[1:]
        return {"forward": forward, "_liger_entropy_parameters": parameters}

    def _replicate_for_data_parallel(self) -> Any:
        """nn.DataParallel runs copies of this instance in threads, so that each needs ``extras`` of its own."""
        if has_layer_kernels(self):  # type: ignore[arg-type]
            raise RuntimeError(
                "liger_kernels: nn.DataParallel cannot run them, because Liger binds each to one layer; use "
                "DistributedDataParallel, or liger_kernels=False"
            )
        replica = super()._replicate_for_data_parallel()  # type: ignore[misc]
        replica._liger_entropy = dataclasses.replace(self._liger_entropy)
        return replica

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        patch, extras = self._liger_entropy, {}
        patch.extras = extras
        try:
            outputs = super().__call__(*args, **kwargs)  # type: ignore[misc]
        finally:
            patch.extras = None
        if extras:  # a second time: what wraps forward, such as accelerate's mixed precision, rebuilds the outputs
            attach(outputs, extras)
        return outputs

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        skip = kwargs.pop("skip_logits", None)
        asked = {name: kwargs.pop(name, False) for name in ("return_token_accuracy", "use_token_scaling")}
        args, kwargs = _divisible(self._liger_entropy_parameters, args, kwargs)
        given = {**dict(zip(self._liger_entropy_parameters, args, strict=False)), **kwargs}
        labels = next((given[name] for name in _LABELS if given.get(name) is not None), None)
        if labels is None and any(name in given or name in self._liger_entropy_parameters for name in _LABELS):
            if skip:
                raise ValueError("skip_logits: there are no labels, so the logits are the only result")
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        fuse = self.training if skip is None else bool(skip)  # type: ignore[attr-defined]
        call = HeadCall(self._liger_entropy, type(self).__name__, fuse, given.get("num_items_in_batch"), **asked)
        heads = [(head, head._liger_entropy_call) for head in _deferring_heads(self)]
        for head, _ in heads:
            head._liger_entropy_call = call
        try:
            return _finished(call, super().forward(*args, **kwargs), labels)  # type: ignore[misc]
        finally:
            for head, before in heads:
                head._liger_entropy_call = before
            call.nodes.clear()  # they refer to the call: the cycle would keep the graph alive until the next collection


def _divisible(parameters: tuple[str, ...], args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """The arguments with a tiny ``num_items_in_batch`` for 0: without a label the loss is 0, not 0 / 0.

    With labels it is inf no longer, but beyond any loss; 1e20 times a gradient, scaled for fp16, still fits fp32.
    """
    name = "num_items_in_batch"

    def divisor(items: Any) -> Any:
        if isinstance(items, Tensor):
            return torch.where(items == 0, 1e-20, items)
        return 1e-20 if items == 0 else items

    if name in kwargs:
        return args, {**kwargs, name: divisor(kwargs[name])}
    named = dict(zip(parameters, args, strict=False))
    return tuple(divisor(a) if n == name else a for n, a in named.items()) + args[len(named) :], kwargs


def _deferring_heads(model: Any) -> list[Any]:
    """Looked up at every call: resizing the vocabulary or PEFT may have put another module in the old one's place."""
    heads: list[Any] = candidates(find_head(model))
    for head in heads:
        defer(head)
    return heads


def _finished(call: HeadCall, outputs: Any, labels: Any) -> Any:
    parts, patch = call.parts, call.patch
    outputs = replace_logits(outputs, call.returned)
    if not parts:
        call.check_loss(outputs)
        return outputs
    extras = {"entropy_loss": parts["entropy_loss"]}
    if "token_accuracy" in parts:
        extras["token_accuracy"] = parts["token_accuracy"]
    if patch.token_statistics:
        extras["token_logprobs"] = like_labels(parts["logprob"], labels)
        extras["token_entropy"] = like_labels(parts["entropy"], labels)
    attach(outputs, extras)
    if patch.extras is not None:
        patch.extras.update(extras)
    return outputs
