"""GRPO in its plainest form on a tiny Llama; log-probabilities and entropies come from the operator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from .. import linear_token_statistics
from ..rl import EntropyController
from . import task


@dataclass(frozen=True)
class Recipe:
    """One run."""

    steps: int = 150
    prompts: int = 16  # per step
    group: int = 8  # completions of each prompt
    updates: int = 2  # passes over each batch of completions
    clip: float = 0.2
    learning_rate: float = 2e-3
    target_entropy: float | None = None  # nats per token; None: no bonus
    seed: int = 0

    def controller(self) -> EntropyController | None:
        """The floor keeps the coefficient from vanishing while the entropy falls from its start, far above."""
        if self.target_entropy is None:
            return None
        return EntropyController(self.target_entropy, coef=0.1, rate=0.2, min_coef=0.05)


@dataclass
class History:
    """One value per step: mean reward, share of right answers, mean entropy (nats), coefficient of the bonus."""

    reward: list[float] = field(default_factory=list)
    right: list[float] = field(default_factory=list)
    entropy: list[float] = field(default_factory=list)
    coef: list[float] = field(default_factory=list)

    def add(self, *values: float) -> None:
        for series, value in zip((self.reward, self.right, self.entropy, self.coef), values, strict=True):
            series.append(value)


def build_policy() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(task.CHARACTERS), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=16, pad_token_id=task.PAD,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def statistics(policy: LlamaForCausalLM, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """logprob and entropy [N, DIGITS] of the completions at the end of tokens [N, S]."""
    hidden = policy.model(tokens[:, :-1], use_cache=False).last_hidden_state[:, -task.DIGITS :]
    s = linear_token_statistics(hidden, policy.lm_head.weight, tokens[:, -task.DIGITS :])
    return s.logprob, s.entropy


@torch.no_grad()
def sample(policy: LlamaForCausalLM, prompts: Tensor) -> Tensor:
    """Prompts [N, P] continued by DIGITS sampled characters."""
    tokens = prompts
    for _ in range(task.DIGITS):  # so short that a cache would not pay
        logits = policy(tokens, use_cache=False, logits_to_keep=1).logits[:, -1]
        tokens = torch.cat([tokens, logits.softmax(-1).multinomial(1)], dim=1)
    return tokens


def rollout(policy: LlamaForCausalLM, recipe: Recipe, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Completed tokens [N, S] and their rewards [N], each group's completions next to one another."""
    picks = torch.randint(len(task.SUMS), (recipe.prompts,), generator=generator).tolist()
    totals = [task.SUMS[i] for i in picks for _ in range(recipe.group)]
    tokens = sample(policy, torch.tensor([task.encode(task.prompt(t)) for t in totals]))
    texts = [task.decode(row) for row in tokens[:, -task.DIGITS :].tolist()]
    return tokens, torch.tensor([task.reward(t, text) for t, text in zip(totals, texts, strict=True)])


def advantages(rewards: Tensor, group: int) -> Tensor:
    """Each reward against its group's mean, in units of the group's deviation (Shao et al. 2024)."""
    groups = rewards.view(-1, group)
    spread = groups.std(dim=1, keepdim=True)
    return ((groups - groups.mean(dim=1, keepdim=True)) / (spread + 1e-4)).view(-1)


def policy_loss(logprob: Tensor, old: Tensor, advantage: Tensor, clip: float) -> Tensor:
    """PPO's clipped objective; logprob and old [N, L], advantage [N]."""
    ratio = (logprob - old).exp()
    a = advantage[:, None]
    return -torch.minimum(ratio * a, ratio.clamp(1 - clip, 1 + clip) * a).mean()


def improve(policy, optimizer, tokens: Tensor, advantage: Tensor, coef: float, recipe: Recipe) -> float:
    """Update the policy on one batch; returns the mean entropy that it had before."""
    with torch.no_grad():
        old, entropy = statistics(policy, tokens)
    for _ in range(recipe.updates):
        logprob, bonus = statistics(policy, tokens)
        loss = policy_loss(logprob, old, advantage, recipe.clip) - coef * bonus.mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
    return float(entropy.mean())


Watcher = Callable[[History], None]


def train(recipe: Recipe, on_step: Watcher = lambda history: None) -> tuple[LlamaForCausalLM, History]:
    """Train a policy from scratch; on_step sees the history after every step."""
    torch.manual_seed(recipe.seed)
    generator = torch.Generator().manual_seed(recipe.seed)
    policy, history = build_policy(), History()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=recipe.learning_rate, weight_decay=0.0)
    controller = recipe.controller()
    coef = 0.0 if controller is None else controller.coef
    for _ in range(recipe.steps):
        tokens, rewards = rollout(policy, recipe, generator)
        entropy = improve(policy, optimizer, tokens, advantages(rewards, recipe.group), coef, recipe)
        history.add(float(rewards.mean()), float((rewards == 1).float().mean()), entropy, coef)
        coef = 0.0 if controller is None else controller.update(entropy)
        on_step(history)
    return policy, history


@torch.no_grad()
def distinct_right_answers(policy: LlamaForCausalLM, total: int, samples: int = 256) -> set[str]:
    tokens = sample(policy, torch.tensor([task.encode(task.prompt(total))] * samples))
    texts = {task.decode(row) for row in tokens[:, -task.DIGITS :].tolist()}
    return {text for text in texts if task.reward(total, text) == 1.0}
