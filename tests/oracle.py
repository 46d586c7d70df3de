"""What every result is compared with: full logits, textbook formulas, PyTorch's own autograd.

Nothing here knows the library. `statistics` and `loss_terms` work in the dtype of the logits they are given: fp64
logits make them the oracle, logits made in the inputs' dtype the plain PyTorch program that a user would write.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def logits_of(
    input: Tensor,  # [..., D]
    linear_weight: Tensor,  # [V, D]
    *,
    linear_bias: Tensor | None = None,  # [V]
    logit_scale: float = 1.0,
    softcap: float | None = None,
    temperature: float | Tensor | None = 1.0,
    dtype: torch.dtype = torch.float64,
) -> Tensor:  # [T, V] of dtype, the product made in the dtype of input and weight
    z = F.linear(input.reshape(-1, input.shape[-1]), linear_weight).to(dtype)
    if linear_bias is not None:
        z = z + linear_bias.to(dtype)
    return transformed(z, logit_scale=logit_scale, softcap=softcap, temperature=temperature)


def transformed(
    z: Tensor, *, logit_scale: float = 1.0, softcap: float | None = None, temperature: float | Tensor | None = 1.0
) -> Tensor:
    """Scale, then softcap, then temperature."""
    z = z * logit_scale
    if softcap is not None:
        z = torch.tanh(z / softcap) * softcap
    if isinstance(temperature, Tensor):
        return z / temperature.reshape(-1, 1).to(z.dtype)
    return z if temperature is None else z / temperature


def entropy_of(z: Tensor) -> Tensor:  # [T, V] -> [T]
    """-sum p ln p, where a class of probability 0 adds 0 and takes no gradient."""
    log_p = torch.log_softmax(z, dim=-1)
    p = torch.softmax(z, dim=-1)
    possible = p != 0
    return -torch.where(possible, p * torch.where(possible, log_p, 0.0), 0.0).sum(dim=-1)


def statistics(z: Tensor, target: Tensor, *, class_weight: Tensor | None = None, ignore_index: int = -100) -> dict:
    """The five statistics in the target's shape; 0 at ignored tokens, and -1 for the prediction."""
    y = target.reshape(-1).long()
    kept = y != ignore_index
    log_p = torch.log_softmax(z, dim=-1)
    c = torch.ones(z.shape[-1], dtype=z.dtype) if class_weight is None else class_weight.to(z.dtype)
    values = dict(
        logprob=log_p.gather(1, torch.where(kept, y, 0)[:, None])[:, 0],
        entropy=entropy_of(z),
        lse=torch.logsumexp(z, dim=-1),
        smooth_logprob=(log_p * c).mean(dim=-1),
    )
    values = {name: torch.where(kept, value, 0.0).view(target.shape) for name, value in values.items()}
    return values | dict(prediction=torch.where(kept, z.argmax(dim=-1), -1).view(target.shape))


def loss_terms(
    z: Tensor,  # [T, V]
    target: Tensor,  # [...], T of them
    *,
    weight: Tensor | None = None,
    token_weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    entropy_coef: float = 0.0,
) -> dict:
    """Every output of the loss by the contract, the cross-entropy from torch itself."""
    y = target.reshape(-1).long()
    kept = y != ignore_index
    c = None if weight is None else weight.to(z.dtype)
    w = kept.to(z.dtype) if token_weight is None else torch.where(kept, token_weight.reshape(-1).to(z.dtype), 0.0)
    ce = F.cross_entropy(z, y, weight=c, ignore_index=ignore_index, reduction="none", label_smoothing=label_smoothing)
    w_of_label = w if c is None else w * c[torch.where(kept, y, 0)]

    def reduce(values: Tensor, count: Tensor) -> Tensor:
        values = torch.where(w == 0, 0.0, w * values)
        if reduction == "none":
            return values.view(target.shape)
        return values.sum() if reduction == "sum" or not bool(kept.any()) else values.sum() / count.sum()

    z_loss = reduce(lse_square_scale * torch.logsumexp(z, dim=-1) ** 2, w)
    entropy_loss = reduce(entropy_of(z), w)
    right = (kept & (z.argmax(dim=-1) == y)).to(z.dtype)
    return dict(
        loss=reduce(ce, w_of_label) + z_loss - entropy_coef * entropy_loss,
        z_loss=z_loss,
        entropy_loss=entropy_loss,
        token_accuracy=right.view(target.shape) if reduction == "none" else right.sum() / kept.sum().clamp(min=1),
        predicted_tokens=torch.where(kept, z.argmax(dim=-1), -1).view(target.shape),
    )
