"""verl's ``linear_cross_entropy`` by the token-statistics operator, put in the place that verl imports it from."""

from __future__ import annotations

import functools
import importlib
import inspect
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor

from ..planner import ComputeOptions
from ..token_statistics import linear_token_statistics
from .substitution import Substitution

_HOME = "verl.utils.kernel.linear_cross_entropy"
_OLDEST = Version("0.4")  # the first release that has the function
_ARGUMENTS = ["hidden", "weight", "labels", "temperature", "reduction", "dist_process_group"]
_active: Substitution | None = None


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float | Tensor = 1.0,
    reduction: str = "none",
    dist_process_group: Any = None,
    *,
    bias: Tensor | None = None,
    ignore_index: int | None = -100,
    options: ComputeOptions | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the labels and the entropy of every token, with verl's signature and results.

    With ``z = (hidden weight^T + bias) / temperature``: ``logprobs = z_y - logsumexp(z)``, which is minus the
    cross-entropy, and ``entropy = logsumexp(z) - sum_j p_j z_j``; both fp32 (fp64 for fp64 inputs), in nats, and
    differentiable with any upstream gradient.

    Args:
        hidden: ``[..., D]``, any D, any strides.
        weight: ``[V, D]``, any V; or ``[D, V]`` as in verl 0.4, which is recognised when D is not its last dimension.
        labels: ``[...]`` integers. Where they are ``ignore_index`` logprob and entropy are 0 with gradient 0.
        temperature: a number, or a tensor: one value, one per token, or a shape that broadcasts to that of the labels
            with as many dimensions (``[B, 1]``: one per sequence).
        reduction: of logprobs only: ``"none"`` (``[T]``, T the number of labels), ``"sum"`` or ``"mean"`` (a scalar;
            the mean over labels that are not ignored, 0 if there is none).
        dist_process_group: ranks that share the vocabulary, each with its rows of the weight. As in verl, each rank's
            gradient of hidden is its share, and their sum is the gradient (Megatron's region functions sum it).
        bias, ignore_index, options: as in :func:`liger_entropy.linear_token_statistics`.

    Returns:
        ``(logprobs, entropy)``; entropy is ``[T]`` whatever the reduction.

    Raises:
        ValueError, TypeError: as :func:`liger_entropy.linear_token_statistics`; ValueError for an unknown reduction.
    """
    if not isinstance(reduction, str) or reduction.lower() not in ("none", "sum", "mean"):
        raise ValueError(f"reduction: expected 'none', 'sum' or 'mean', got {reduction!r}")
    statistics = linear_token_statistics(
        _shared(hidden, dist_process_group), _vocabulary_first(weight, hidden), labels, linear_bias=bias,
        ignore_index=ignore_index, temperature=_per_token(temperature, labels), process_group=dist_process_group,
        options=options, fields=("logprob", "entropy"),
    )  # fmt: skip
    logprobs = statistics.logprob.reshape(-1)
    if reduction.lower() != "none":
        logprobs = logprobs.sum()
    if reduction.lower() == "mean":
        kept = labels.long() != (-100 if ignore_index is None else ignore_index)  # in uint8 -100 is the label 156
        logprobs = logprobs / kept.sum().clamp(min=1)
    return logprobs, statistics.entropy.reshape(-1)


def _vocabulary_first(weight: Tensor, hidden: Tensor) -> Tensor:
    """A [D, V] weight as [V, D]; a square one is taken as [V, D]."""
    size = hidden.shape[-1]
    return weight.t() if weight.ndim == 2 and weight.shape[1] != size and weight.shape[0] == size else weight


def _per_token(temperature: float | Tensor, labels: Tensor) -> float | Tensor:
    if not isinstance(temperature, Tensor) or temperature.ndim != labels.ndim or temperature.numel() == labels.numel():
        return temperature
    return temperature.expand_as(labels)


def _shared(hidden: Tensor, group: Any) -> Tensor:
    """The operator gives every rank the whole gradient of hidden; verl's callers sum the shares of the ranks."""
    size = 1 if group is None else torch.distributed.get_world_size(group)
    if size > 1 and hidden.requires_grad:
        hidden = hidden.view_as(hidden)
        hidden.register_hook(lambda gradient: gradient / size)
    return hidden


def apply_to_verl(options: ComputeOptions | None = None) -> None:
    """Make verl's actors (``use_fused_kernels`` with ``impl_backend: triton``, and Megatron's fused forward) call this.

    Acts on the current process. verl's workers are processes of their own: there, set the environment variable
    ``VERL_USE_EXTERNAL_MODULES=liger_entropy.integrations.verl_plugin``. Calling it again replaces the options.

    Raises:
        ImportError: verl is not installed.
        RuntimeError: a verl older than 0.4, or one whose function takes other arguments.
    """
    global _active
    remove_from_verl()
    version = importlib.import_module("verl").__version__
    if Version(version) < _OLDEST:
        raise RuntimeError(f"verl {version} has no {_HOME}; apply_to_verl needs verl {_OLDEST} or newer")
    home = importlib.import_module(_HOME)
    arguments = list(inspect.signature(home.LinearCrossEntropy.forward).parameters)[1:]  # without ctx
    if arguments != _ARGUMENTS:
        raise RuntimeError(f"verl {version}: its linear_cross_entropy takes {arguments}, expected {_ARGUMENTS}")
    replacement = functools.partial(linear_cross_entropy, options=options)
    _active = Substitution(home, "linear_cross_entropy", replacement)


def remove_from_verl() -> None:
    """Undo :func:`apply_to_verl` in this process; nothing happens if it was not applied."""
    global _active
    if _active is not None:
        _active.undo()
        _active = None
