"""Random inputs of a head, and the fp64 truth beside which errors are measured."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Head:
    """x [T, D], w [V, D] leaves; y [T]; g_logprob, g_entropy [T] arbitrary upstream gradients."""

    x: Tensor
    w: Tensor
    y: Tensor
    g_logprob: Tensor
    g_entropy: Tensor

    @property
    def gradient_bytes(self) -> int:
        return self.x.nbytes + self.w.nbytes

    @property
    def logits_bytes(self) -> int:
        """Of the fp32 logits that are never made."""
        return 4 * self.x.shape[0] * self.w.shape[0]


def make_head(tokens: int, hidden: int, vocab: int, device: torch.device, dtype=torch.bfloat16, ignored=0.0) -> Head:
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, device=device, generator=generator)

    x = normal(tokens, hidden).to(dtype).requires_grad_()
    w = torch.cat([normal(min(8192, vocab - r), hidden) for r in range(0, vocab, 8192)]).mul_(2 / hidden**0.5)
    y = torch.randint(0, vocab, (tokens,), device=device, generator=generator)
    y[: int(tokens * ignored)] = -100
    y = y[torch.randperm(tokens, device=device, generator=generator)]
    return Head(x, w.to(dtype).requires_grad_(), y, normal(tokens), normal(tokens))


@dataclass
class Truth:
    """fp64 results, made a block of tokens at a time."""

    logprob: Tensor
    entropy: Tensor
    dx: Tensor
    dw: Tensor


def fp64_truth(head: Head, rows: int = 512) -> Truth:
    """Values and gradients of ``sum(g_logprob logprob + g_entropy entropy)`` from full fp64 logits of `rows` tokens
    at a time, by autograd."""
    w = head.w.detach().double().requires_grad_()
    parts = []
    for r in range(0, head.x.shape[0], rows):
        here = slice(r, r + rows)
        x = head.x[here].detach().double().requires_grad_()
        log_p = (x @ w.t()).log_softmax(-1)
        logprob = log_p.gather(1, head.y[here, None])[:, 0]
        entropy = -(log_p.exp() * log_p).sum(-1)
        (logprob @ head.g_logprob[here].double() + entropy @ head.g_entropy[here].double()).backward()
        parts.append((logprob.detach(), entropy.detach(), x.grad))
    logprob, entropy, dx = (torch.cat(column) for column in zip(*parts, strict=True))
    assert w.grad is not None
    return Truth(logprob, entropy, dx, w.grad)


def relative(value: Tensor, truth: Tensor) -> float:
    """|value - truth| / |truth| in the Frobenius norm."""
    return ((value.double() - truth).norm() / truth.norm()).item()
