"""How far a trajectory is from another, and how far it may be."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from .training import Trajectory

FIELDS = tuple(f.name for f in fields(Trajectory))


@dataclass(frozen=True)
class Deviation:
    """``size``: the largest difference from the reference; ``mean``: the mean signed one, in which a systematic shift
    shows long before it is the largest. In nats and logits; the gradient norm relative to the reference's; the
    parameters relative to the RMS of the reference's moves, with their RMS difference for a size."""

    size: float
    mean: float


# A bound is a deviation that no member may exceed. fp32: rounding differs, nothing else does; measured with every
# weight moved by one unit in the last place: loss 6e-6, gradient norm 2e-4, entropy 1e-5, parameters 6e-4
# (GPT-2, whose key biases have no gradient but rounding), top logits 5e-4.
FP32 = {
    "loss": Deviation(1e-4, 5e-6),
    "grad_norm": Deviation(3e-3, 5e-5),
    "entropy": Deviation(1e-4, 5e-6),
    "parameters": Deviation(3e-3, 3e-4),
    "top_logit": Deviation(1e-2, 1e-4),
    "held_out": Deviation(1e-4, 5e-5),
}
# bf16: roundings of activations and weights flip; differences grow to 1e-2 nats by step 40 and stay there. Measured
# with the nudge and with a plain head in fp32 (Qwen3 is the farthest): loss 3e-2, gradient norm 1.2 (at a spike),
# entropy 9e-2, parameters 1e-1, top logits 1.4, held out 2e-2; their means over the steps are 10 to 100 times less.
BF16 = {
    "loss": Deviation(1e-1, 5e-3),
    "grad_norm": Deviation(3.0, 1e-1),
    "entropy": Deviation(2e-1, 1.5e-2),
    "parameters": Deviation(3e-1, 2e-2),
    "top_logit": Deviation(3.0, 2e-1),
    "held_out": Deviation(8e-2, 6e-2),
}


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
    return Deviation(size.item(), difference.mean().item())


def violations(reference: Trajectory, member: Trajectory, bounds: dict[str, Deviation]) -> list[str]:
    """One line for every bound that the member exceeds; a NaN exceeds all."""
    lines = []
    for field in FIELDS:
        found, bound = deviation(reference, member, field), bounds[field]
        if not (found.size <= bound.size and abs(found.mean) <= bound.mean):
            size, mean = f"size {found.size:.1e}", f"mean {found.mean:+.1e}"
            lines.append(f"{field}: {size} (bound {bound.size:.0e}), {mean} (bound {bound.mean:.0e})")
    return lines
