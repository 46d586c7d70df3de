"""Training steps and held-out figures, with and without the patch."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from liger_entropy import ComputeOptions, apply_liger_entropy

# At 5e-3 the rounding errors of two runs grow to 1e-2 nats after 100 steps; at 3e-3 they stayed at 1e-6 for 160.
LEARNING_RATE = 3e-3
WARMUP_STEPS = 20


class Objective(NamedTuple):
    loss: torch.Tensor  # what is minimised: cross-entropy - entropy_coef * entropy
    entropy: torch.Tensor  # mean over the predicted tokens, in nats


@dataclass
class History:
    cross_entropy: list[float] = field(default_factory=list)
    entropy: list[float] = field(default_factory=list)
    seconds: float = 0.0


def patched_objective(model: PreTrainedModel, entropy_coef: float) -> Callable[[torch.Tensor], Objective]:
    """The patched model's own loss: no logits are built, and none are kept for the backward pass."""
    options = ComputeOptions(cache_bytes=0)
    apply_liger_entropy(model, entropy_coef=entropy_coef, token_statistics=True, options=options)

    def objective(ids: torch.Tensor) -> Objective:
        outputs = model(input_ids=ids, labels=ids)
        return Objective(outputs.loss, outputs.entropy_loss)

    return objective


def plain_objective(model: PreTrainedModel, entropy_coef: float) -> Callable[[torch.Tensor], Objective]:
    """The same loss from the model's full logits ``[B, S, V]``."""

    def objective(ids: torch.Tensor) -> Objective:
        outputs = model(input_ids=ids, labels=ids)
        logp = outputs.logits[:, :-1].float().log_softmax(-1)
        entropy = -(logp.exp() * logp).sum(-1).mean()
        return Objective(outputs.loss - entropy_coef * entropy, entropy)

    return objective


def train(
    model: PreTrainedModel,
    objective: Callable[[torch.Tensor], Objective],
    data: Iterator[torch.Tensor],
    steps: int,
    entropy_coef: float,
    on_step: Callable[[History], None],
) -> History:
    """AdamW with warm-up and cosine decay; ``on_step`` is told the history after every step."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, steps))
    history, start = History(), time.perf_counter()
    for _ in range(steps):
        loss, entropy = objective(next(data).to(model.device))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        history.entropy.append(entropy.item())
        history.cross_entropy.append(loss.item() + entropy_coef * history.entropy[-1])
        history.seconds = time.perf_counter() - start
        on_step(history)
    return history


def _rate(step: int, steps: int) -> float:
    """Linear warm-up, then half a cosine down to a tenth."""
    return min(1.0, (step + 1) / WARMUP_STEPS) * (0.55 + 0.45 * math.cos(math.pi * step / steps))


@torch.no_grad()
def held_out_means(
    model: PreTrainedModel,
    objective: Callable[[torch.Tensor], Objective],
    data: list[torch.Tensor],
    entropy_coef: float,
) -> tuple[float, float]:
    """Mean cross-entropy and entropy over held-out batches, in nats."""
    model.eval()
    values = [objective(ids.to(model.device)) for ids in data]
    entropy = sum(v.entropy.item() for v in values) / len(values)
    return sum(v.loss.item() for v in values) / len(values) + entropy_coef * entropy, entropy


@torch.no_grad()
def token_entropies(model: PreTrainedModel, ids: list[int], length: int) -> list[float]:
    """For every token but the first, the entropy of the patched model's guess before it sees the token.

    Windows of ``length`` tokens overlap by half, so that all but the first have at least half of one before them.
    """
    model.eval()
    entropies: list[float] = []
    for end in range(length, len(ids) + length // 2, length // 2):
        start = max(0, end - length)
        window = torch.tensor([ids[start:end]], device=model.device)
        of_window = model(input_ids=window, labels=window).token_entropy[0, :-1].tolist()
        entropies.extend(of_window[len(entropies) - start :])
    return entropies
