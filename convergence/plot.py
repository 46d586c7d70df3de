"""A class in a picture: the trajectories, and how far each member is from the plain one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.figure import Figure

from .training import Trajectory

if TYPE_CHECKING:
    from .classes import EquivalenceClass

_SERIES = {"loss": "loss, nats", "entropy": "mean entropy, nats", "grad_norm": "gradient norm"}


def draw(cls: EquivalenceClass, runs: dict[str, Trajectory], path: Path) -> None:
    """Upper row: every member's series, which lie on each other. Lower row: how far each is from the plain one."""
    figure = Figure(figsize=(12, 6), layout="constrained")
    axes = figure.subplots(2, len(_SERIES), sharex=True)
    figure.suptitle(f"{cls.name}: {len(runs)} ways to train the same")
    for column, (field, label) in enumerate(_SERIES.items()):
        for number, (member, run) in enumerate(runs.items()):
            # Later lines are thinner, so that those below stay visible.
            axes[0, column].plot(getattr(run, field), label=member, linewidth=6 / (number + 1), alpha=0.8)
        axes[0, column].set_title(label, fontsize=10)
        _draw_differences(axes[1, column], runs, field, cls.bounds[field].size)
    axes[0, 0].legend(fontsize=8)
    figure.savefig(path, dpi=60)


def _draw_differences(axes, runs: dict[str, Trajectory], field: str, bound: float) -> None:
    plain = getattr(runs["plain"], field)
    for number, (member, run) in enumerate(runs.items()):
        if member != "plain":
            size = [_difference(a, b, field) for a, b in zip(getattr(run, field), plain, strict=True)]
            axes.plot(size, color=f"C{number}", linewidth=0.8)
    axes.axhline(bound, color="black", linestyle=":", linewidth=1)
    axes.set_yscale("log")
    axes.set_title(f"{'relative ' if field == 'grad_norm' else ''}distance from plain, bound dotted", fontsize=9)
    axes.set_xlabel("step")


def _difference(value: float, plain: float, field: str) -> float:
    """At least fp32's rounding, so that equal values have a place on a logarithmic axis."""
    size = abs(value - plain) / (plain if field == "grad_norm" else 1.0)
    return max(size, 1e-8)
