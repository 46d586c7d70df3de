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
    """Upper row: every member's series, which lie on each other. Lower row: differences, with the bounds."""
    figure = Figure(figsize=(12, 6), layout="constrained")
    axes = figure.subplots(2, len(_SERIES), sharex=True)
    figure.suptitle(f"{cls.name}: {len(runs)} ways to train the same")
    for column, (field, label) in enumerate(_SERIES.items()):
        _draw_series(axes[0, column], runs, field, label)
        _draw_differences(axes[1, column], runs, field, cls.bounds[field].size)
    axes[0, 0].legend(fontsize=8)
    figure.savefig(path, dpi=80)


def _draw_series(axes, runs: dict[str, Trajectory], field: str, label: str) -> None:
    for number, (member, run) in enumerate(runs.items()):
        # Later lines are thinner, so that those below stay visible.
        axes.plot(getattr(run, field), label=member, linewidth=6 / (number + 1), alpha=0.8)
    axes.set_title(label, fontsize=10)


def _draw_differences(axes, runs: dict[str, Trajectory], field: str, bound: float) -> None:
    plain = getattr(runs["plain"], field)
    for member, run in runs.items():
        axes.plot([_difference(a, b, field) for a, b in zip(getattr(run, field), plain, strict=True)], label=member)
    for side in (-bound, bound):
        axes.axhline(side, color="black", linestyle=":", linewidth=1)
    axes.set_yscale("symlog", linthresh=bound / 1000)
    axes.set_title(f"{'relative ' if field == 'grad_norm' else ''}difference from plain, bound dotted", fontsize=9)
    axes.set_xlabel("step")


def _difference(value: float, plain: float, field: str) -> float:
    return (value - plain) / plain if field == "grad_norm" else value - plain
