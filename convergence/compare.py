"""How far a trajectory is from another, and how far it may be."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from .training import Trajectory

FIELDS = tuple(f.name for f in fields(Trajectory))


# Per step; the other fields have one value a weight or a position, after training.
SERIES = ("loss", "grad_norm", "entropy")
EARLY_STEPS = 20


@dataclass(frozen=True)
class Deviation:
    """``size``: the largest difference from the reference; ``mean``: the mean signed one, in which a systematic shift
    shows long before it is the largest; ``early``: the mean signed one of the first 20 steps, before roundings have
    grown, 0 for a field without steps. In nats and logits; the gradient norm relative to the reference's; the
    parameters relative to the RMS of the reference's moves, with their RMS difference for a size."""

    size: float
    mean: float
    early: float = 0.0


# A bound is a deviation that no member may exceed. Each stands well above what rounding alone makes in plain torch
# (`python -m convergence.noise`, on x86 with AVX2 and torch 2.13.0), whose largest over the classes is beside it.
FP32 = {
    "loss": Deviation(1e-4, 5e-6, 2e-6),  # 3e-6, 1e-7, 2e-7
    "grad_norm": Deviation(3e-3, 5e-5, 5e-6),  # 6e-5, 2e-6, 3e-7
    "entropy": Deviation(1e-4, 5e-6, 2e-6),  # 3e-5, 3e-7, 2e-7
    "parameters": Deviation(3e-3, 3e-4),  # 1e-4 (GPT-2, whose key biases have no gradient but rounding), 4e-6
    "top_logit": Deviation(1e-2, 1e-4),  # 1e-4, 1e-5
    "held_out": Deviation(1e-4, 5e-5),  # 8e-6, 4e-6
}
# A negative coefficient, which rewards runaway logits, and GPT-2 with every option: differences grow tenfold.
FP32_UNSTEADY = FP32 | {
    "loss": Deviation(1e-3, 3e-5, 2e-6),  # 8e-5, 2e-6, 2e-7
    "grad_norm": Deviation(3e-2, 5e-4, 5e-6),  # 4e-3, 4e-5, 7e-8
    "entropy": Deviation(1e-3, 3e-5, 2e-6),  # 1e-4, 3e-6, 2e-7
    "top_logit": Deviation(1e-2, 5e-4),  # 8e-4, 6e-5
    "held_out": Deviation(3e-4, 2e-4),  # 3e-5, 1e-5
}
# bf16: roundings of activations and weights flip.
BF16 = {
    "loss": Deviation(2e-2, 2e-3, 1e-3),  # 4e-3, 5e-4, 2e-4
    "grad_norm": Deviation(5e-1, 2e-2, 5e-3),  # 6e-2, 2e-3, 6e-4; 2e-1, 4e-3, 1e-3 with a plain head in fp32
    "entropy": Deviation(5e-2, 6e-3, 5e-4),  # 2e-2, 4e-4, 8e-5; its mean 2e-3 with that head
    "parameters": Deviation(6e-2, 5e-3),  # 2e-2, 1e-3
    "top_logit": Deviation(8e-1, 3e-2),  # 3e-1, 7e-3
    "held_out": Deviation(2e-2, 1.5e-2),  # 6e-3, 3e-3
}
# Where flips grow (Mixtral's change its routing) and the gradient norm has spikes. The first steps are as above.
BF16_UNSTEADY = {
    "loss": Deviation(2e-1, 5e-3, 1e-3),  # 8e-2, 1e-3, 1e-4
    "grad_norm": Deviation(4.0, 1e-1, 5e-3),  # 1.3, 4e-2, 8e-4
    "entropy": Deviation(6e-1, 2e-2, 5e-4),  # 3e-1, 6e-3, 4e-5
    "parameters": Deviation(4e-1, 6e-2),  # 2e-1, 2e-2
    "top_logit": Deviation(4.0, 3e-1),  # 1.4, 1e-1
    "held_out": Deviation(1.5e-1, 1e-1),  # 5e-2, 4e-2
}


def widened(bounds: dict[str, Deviation], noise: dict[str, dict[str, float]], times: float) -> dict[str, Deviation]:
    """Bounds for a place where rounding alone makes ``noise``: at least `times` that. The first steps stay as bound."""
    return {
        field: Deviation(
            max(b.size, times * noise[field]["size"]), max(b.mean, times * noise[field]["mean"]), b.early
        )
        for field, b in bounds.items()
    }  # fmt: skip


def deviation(reference: Trajectory, member: Trajectory, field: str) -> Deviation:
    """Raises ValueError if the two do not have equally many values."""
    expected, got = (torch.tensor(getattr(t, field), dtype=torch.float64) for t in (reference, member))
    if expected.shape != got.shape:
        raise ValueError(f"{field}: {len(got)} values beside the reference's {len(expected)}")
    difference = got - expected
    if field == "grad_norm":
        difference = difference / expected
    if field == "parameters":
        difference = difference / expected.square().mean().sqrt()
    size = difference.square().mean().sqrt() if field == "parameters" else difference.abs().max()
    early = difference[:EARLY_STEPS].mean().item() if field in SERIES else 0.0
    return Deviation(size.item(), difference.mean().item(), early)


def violations(reference: Trajectory, member: Trajectory, bounds: dict[str, Deviation]) -> list[str]:
    """One line for every field with a deviation beyond its bound; a NaN is beyond all."""
    lines = []
    for field in FIELDS:
        found, bound = vars(deviation(reference, member, field)), vars(bounds[field])
        if not all(abs(found[name]) <= bound[name] for name in found):
            beside = (f"{name} {size:+.1e} (bound {bound[name]:.0e})" for name, size in found.items())
            lines.append(f"{field}: {', '.join(beside)}")
    return lines
