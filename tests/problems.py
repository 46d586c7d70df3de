"""Random problems, the three ways to solve them (library, fp64 oracle, plain PyTorch), and the rule to compare them.

The tolerance rule: our error against fp64 is at most `k` times that of plain PyTorch in the same dtype, plus one
rounding to the result's dtype and 8 (1 + ln V) machine epsilons of the arithmetic, relative to the largest value (or
to 0.5, the size of terms that cancel). Averaged over seeds both errors are equal within a quarter; k = 3 covers the
spread of one draw's largest error. ln V is the size of log d and H, whose one rounding is common to a row's gradients.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field, replace

import oracle
import torch
from torch import Tensor

from liger_entropy import ComputeOptions, cross_entropy, linear_cross_entropy, linear_token_statistics

TRANSFORM = ("logit_scale", "softcap", "temperature")
STATISTICS = ("logprob", "entropy", "lse", "smooth_logprob", "prediction")
TERMS = ("loss", "z_loss", "entropy_loss", "token_accuracy", "predicted_tokens")


@dataclass
class Problem:
    """One call: its tensors and every other option by name."""

    target: Tensor  # [...]
    input: Tensor | None = None  # [..., D]
    linear_weight: Tensor | None = None  # [V, D]
    logits: Tensor | None = None  # [..., V], instead of the two above
    options: dict = field(default_factory=dict)

    def differentiable(self) -> dict[str, Tensor]:
        tensors = dict(logits=self.logits, input=self.input, linear_weight=self.linear_weight)
        tensors |= {name: self.options.get(name) for name in ("linear_bias", "token_weight")}
        return {name: t for name, t in tensors.items() if t is not None}

    def leaves(self, dtype: torch.dtype | None = None) -> Problem:
        """Fresh leaves that require grad, in another dtype if one is given."""
        fresh = {
            n: t.detach().to(dtype or t.dtype, copy=True).requires_grad_() for n, t in self.differentiable().items()
        }
        tensors = {n: fresh.pop(n) for n in ("input", "linear_weight", "logits") if n in fresh}
        return replace(self, options=self.options | fresh, **tensors)

    @property
    def dtype(self) -> torch.dtype:
        return (self.logits if self.input is None else self.input).dtype

    @property
    def vocab(self) -> int:
        return len(self.linear_weight) if self.logits is None else self.logits.shape[-1]

    @property
    def accumulator(self) -> torch.dtype:
        return torch.float64 if self.dtype == torch.float64 else torch.float32


def labels(shape, vocab: int, ignored: float = 0.3, ignore_index: int = -100) -> Tensor:
    """Random labels of which about a third are ignored, but the last never."""
    target = torch.randint(0, vocab, shape)
    flat = torch.where(torch.rand(target.shape) < ignored, ignore_index, target).view(-1)
    flat[-1:] = target.view(-1)[-1:]
    return flat.view(target.shape)


def problem(
    shape, hidden: int, vocab: int, dtype=torch.float32, names=(), seed: int = 0, ignored=0.3, **options
) -> Problem:
    """`names` picks the tensor options; `shape` is the target's."""
    generator = torch.random.manual_seed(seed)
    shape = (shape,) if isinstance(shape, int) else shape
    tokens = torch.Size(shape).numel()
    tensors = dict(
        linear_bias=torch.randn(vocab, generator=generator).to(dtype),
        weight=torch.rand(vocab, generator=generator) + 0.1,
        token_weight=torch.rand(shape, generator=generator) * 2,
        temperature=torch.rand(tokens, generator=generator) + 0.5,
    )
    return Problem(
        labels(shape, vocab, ignored, options.get("ignore_index", -100)),
        torch.randn(*shape, hidden, generator=generator).to(dtype),
        torch.randn(vocab, hidden, generator=generator).to(dtype),
        options={name: tensors[name] for name in names} | options,
    )


def given(p: Problem) -> Problem:
    """The same problem from its logits on."""
    z = oracle.logits_of(p.input.double(), p.linear_weight.double()).to(p.dtype)
    options = {n: v for n, v in p.options.items() if n != "linear_bias"}
    return Problem(p.target, logits=z.view(*p.target.shape, -1), options=options)


def all_losses(p: Problem, compute: ComputeOptions | None = None) -> dict[str, Tensor]:
    """Every output of the library's loss."""
    more = {f"return_{name}": True for name in TERMS[1:]}
    if p.logits is not None:
        output = cross_entropy(p.logits, p.target, **p.options, **more, options=compute)
    else:
        output = linear_cross_entropy(p.input, p.linear_weight, p.target, **p.options, **more, options=compute)
    return {name: getattr(output, name) for name in TERMS}


def all_statistics(p: Problem, compute: ComputeOptions | None = None) -> dict[str, Tensor]:
    """Every output of linear_token_statistics; the problem's class weights go by their name there."""
    options = {("class_weight" if n == "weight" else n): v for n, v in p.options.items()}
    output = linear_token_statistics(p.input, p.linear_weight, p.target, **options, options=compute)
    return {name: getattr(output, name) for name in STATISTICS}


def plain_logits(p: Problem, dtype: torch.dtype) -> tuple[Tensor, dict]:
    """Logits and the options that are left for the formulas on them."""
    options = dict(p.options)
    transform = {name: options.pop(name) for name in TRANSFORM if name in options}
    if p.logits is not None:
        return oracle.transformed(p.logits.reshape(-1, p.logits.shape[-1]).to(dtype), **transform), options
    bias = options.pop("linear_bias", None)
    return oracle.logits_of(p.input, p.linear_weight, linear_bias=bias, dtype=dtype, **transform), options


def plain_losses(p: Problem) -> dict[str, Tensor]:
    z, options = plain_logits(p, p.accumulator)
    return oracle.loss_terms(z, p.target, **options)


def plain_statistics(p: Problem) -> dict[str, Tensor]:
    z, options = plain_logits(p, p.accumulator)
    options["class_weight"] = options.pop("weight", None)
    return oracle.statistics(z, p.target, **options)


@dataclass
class Result:
    values: dict[str, Tensor]
    gradients: dict[str, Tensor]


def solve(function, p: Problem, dtype: torch.dtype | None = None) -> Result:
    """Values, and gradients of the sum of all outputs, each times a fixed random upstream gradient."""
    p = p.leaves(dtype)
    values = function(p)
    generator = torch.Generator().manual_seed(5)
    upstream = {n: torch.randn(v.shape, generator=generator) for n, v in values.items() if v.is_floating_point()}
    total = sum((values[n] * g.to(values[n].dtype)).sum() for n, g in upstream.items() if values[n].requires_grad)
    leaves = p.differentiable()
    gradients = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    return Result({n: v.detach() for n, v in values.items()}, dict(zip(leaves, gradients, strict=True)))


def largest(tensor: Tensor) -> float:
    return tensor.abs().max().item() if tensor.numel() else 0.0


def check_close(name, ours: Tensor, exact: Tensor, plain: Tensor, vocab: int, k: float = 3.0) -> None:
    """The tolerance rule above."""
    assert ours is not None, f"{name}: no result"
    assert ours.shape == exact.shape, f"{name}: shape {tuple(ours.shape)}, expected {tuple(exact.shape)}"
    if not ours.is_floating_point():
        assert torch.equal(ours, exact), f"{name}: {ours} is not {exact}"
        return
    arithmetic = torch.finfo(torch.promote_types(ours.dtype, torch.float32)).eps
    arithmetic *= 1 if arithmetic > 1e-10 else 8  # the fp64 oracle rounds no less than we do
    rounding = 0.0 if ours.dtype.itemsize > 2 else torch.finfo(ours.dtype).eps / 2
    error, allowed = largest(ours - exact), k * largest(plain.to(exact.dtype) - exact)
    allowed += (8 * (1 + math.log(vocab)) * arithmetic + rounding) * max(largest(exact), 0.5)
    assert error <= allowed, f"{name}: error {error:.3e}, allowed {allowed:.3e}"


def check(ours_function, plain_function, p: Problem, k: float = 3.0, values_in=None) -> Result:
    """Solve `p` in three ways and compare every value and gradient. Statistics of half inputs must be as exact as those
    of plain PyTorch in fp32 (`values_in`), their gradients as exact as those in the half dtype."""
    ours, exact = solve(ours_function, p), solve(plain_function, p, torch.float64)
    plain = exact if p.dtype == torch.float64 else solve(plain_function, p)
    plain_values = plain if p.dtype.itemsize > 2 else solve(plain_function, p, values_in or torch.float32)
    for name, value in ours.values.items():
        assert not value.is_floating_point() or value.dtype == p.accumulator, f"{name}: {value.dtype}"
        check_close(name, value, exact.values[name], plain_values.values[name], p.vocab, k)
    for name, gradient in ours.gradients.items():
        assert gradient.dtype == p.differentiable()[name].dtype, f"{name}: gradient is {gradient.dtype}"
        check_close(f"gradient of {name}", gradient, exact.gradients[name], plain.gradients[name], p.vocab, k)
    return ours


def check_losses(p: Problem, compute: ComputeOptions | None = None, k: float = 3.0) -> Result:
    return check(functools.partial(all_losses, compute=compute), plain_losses, p, k)


def check_statistics(p: Problem, compute: ComputeOptions | None = None, k: float = 3.0) -> Result:
    return check(functools.partial(all_statistics, compute=compute), plain_statistics, p, k)
