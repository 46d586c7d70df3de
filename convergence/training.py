"""One run: a model, an objective and a precision to a trajectory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .data import held_out_batch, training_batches
from .models import build

LEARNING_RATE = 3e-3
WARMUP = 20
SAMPLES_PER_PARAMETER = 16

# (ids, labels) -> (loss to minimise, mean entropy in nats), both scalars.
Objective = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass
class Trajectory:
    """What members of a class are compared by."""

    loss: list[float] = field(default_factory=list)  # per step, nats
    grad_norm: list[float] = field(default_factory=list)  # per step, before clipping
    entropy: list[float] = field(default_factory=list)  # per step, nats
    parameters: list[float] = field(default_factory=list)  # how far sampled weights moved, up to 16 of each parameter
    top_logit: list[float] = field(default_factory=list)  # largest logit at every held-out position, after training
    held_out: list[float] = field(default_factory=list)  # cross-entropy and entropy on held-out text, after training


@dataclass(frozen=True)
class Precision:
    """``weights``: the model's dtype, beside fp32 copies that the optimizer moves; ``autocast``: to bf16, or not."""

    weights: torch.dtype = torch.float32
    autocast: bool = False

    def context(self, device: str):
        return torch.autocast(device, torch.bfloat16) if self.autocast else nullcontext()


PRECISIONS = {
    "fp32": Precision(),
    "bf16": Precision(weights=torch.bfloat16),
    "autocast": Precision(autocast=True),
}


class Weights:
    """fp32 weights for the optimizer beside the model's own."""

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype):
        self.masters = [p.detach().clone().requires_grad_() for p in model.parameters()]
        self.start = self.sample()
        self.working = list(model.to(dtype).parameters())

    def sample(self) -> Tensor:
        return torch.cat([p.detach().flatten()[_spread(p.numel(), p.device)] for p in self.masters])

    def take_gradients(self) -> None:
        for master, working in zip(self.masters, self.working, strict=True):
            master.grad = None if working.grad is None else working.grad.float()
            working.grad = None

    @torch.no_grad()
    def publish(self) -> None:
        for master, working in zip(self.masters, self.working, strict=True):
            working.copy_(master)


def _spread(size: int, device: torch.device) -> Tensor:
    return torch.linspace(0, size - 1, min(size, SAMPLES_PER_PARAMETER), device=device).long()


def train(
    name: str,
    objective_of: Callable[[PreTrainedModel], Objective],
    steps: int,
    precision: str = "fp32",
    device: str = "cpu",
    nudge: int = 0,
) -> Trajectory:
    """AdamW with warm-up, cosine decay and clipping. ``nudge``: every weight is first moved by one unit in its last
    place, up or down by this seed (0: not at all); what comes of it is the noise of any other order of additions."""
    model = build(name)
    if nudge:
        nudge_weights(model, nudge)
    model.to(device).train()
    weights = Weights(model, PRECISIONS[precision].weights)
    trajectory = Trajectory()
    optimize(weights, objective_of(model), PRECISIONS[precision], device, steps, training_batches(), trajectory)
    trajectory.parameters = (weights.sample() - weights.start).tolist()
    _look_at_held_out(model, device, trajectory)
    return trajectory


def optimize(
    weights: Weights,
    objective: Objective,
    precision: Precision,
    device: str,
    steps: int,
    data: Iterator[tuple[Tensor, Tensor]],
    trajectory: Trajectory,
    after_step: Callable[[int], None] = lambda step: None,
) -> None:
    optimizer = torch.optim.AdamW(weights.masters, lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, steps))
    for step in range(steps):
        ids, labels = (part.to(device) for part in next(data))
        with precision.context(device):
            loss, entropy = objective(ids, labels)
        loss.backward()
        weights.take_gradients()
        norm = torch.nn.utils.clip_grad_norm_(weights.masters, 1.0)
        optimizer.step()
        schedule.step()
        weights.publish()
        trajectory.loss.append(loss.item())
        trajectory.grad_norm.append(norm.item())
        trajectory.entropy.append(entropy.item())
        after_step(step)


def rate(step: int, steps: int) -> float:
    """Linear warm-up, then half a cosine down to a tenth."""
    return min(1.0, (step + 1) / WARMUP) * (0.55 + 0.45 * math.cos(math.pi * step / steps))


@torch.no_grad()
def nudge_weights(model: torch.nn.Module, seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        up = torch.randint(2, weight.shape, generator=generator).to(weight)
        weight.copy_(torch.nextafter(weight, (2 * up - 1) * math.inf))


@torch.no_grad()
def _look_at_held_out(model: PreTrainedModel, device: str, trajectory: Trajectory) -> None:
    ids = held_out_batch().to(device)
    logits = model.eval()(input_ids=ids).logits.float()  # [B, S, V]
    trajectory.top_logit = logits.amax(-1).flatten().tolist()
    logp = logits[:, :-1].log_softmax(-1)
    cross_entropy = -logp.gather(-1, ids[:, 1:, None]).mean()
    entropy = -(logp.exp() * logp).sum(-1).mean()
    trajectory.held_out = [cross_entropy.item(), entropy.item()]
