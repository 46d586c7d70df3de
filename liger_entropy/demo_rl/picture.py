"""Reward and entropy of the runs over their steps, as a PNG."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

if TYPE_CHECKING:
    from .training import History

COLOURS = ("#c2543a", "#2b6f8f")
SMOOTHING = 9  # steps of the running mean drawn over the raw values


def draw(runs: dict[str, History], found: dict[str, list[int]], totals: list[int], target: float, path: Path) -> None:
    """runs: label -> history; found: label -> number of distinct right answers for each of totals."""
    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 3.8), width_ratios=(1.2, 1.2, 1))
    for (label, history), colour in zip(runs.items(), COLOURS, strict=True):
        _curve(left, history.reward, colour, label)
        _curve(middle, history.entropy, colour, label)
    left.set(title="Mean reward", xlabel="step", ylim=(0, 1.02))
    left.legend(frameon=False, loc="lower right")
    middle.axhline(target, color="0.35", linewidth=1, linestyle=(0, (4, 3)))
    middle.annotate(f"target {target:g}", (1.01, target), xycoords=("axes fraction", "data"), va="center", color="0.35")
    middle.set(title="Entropy of the policy, nats per token", xlabel="step", ylim=(0, None))
    _bars(right, found, totals)
    figure.tight_layout(w_pad=2.5)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _curve(axis, values: list[float], colour: str, label: str) -> None:
    axis.plot(values, color=colour, alpha=0.22, linewidth=1)
    half = SMOOTHING // 2
    windows = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    axis.plot([sum(w) / len(w) for w in windows], color=colour, linewidth=2, label=label)


def _bars(axis, found: dict[str, list[int]], totals: list[int]) -> None:
    width = 0.8 / len(found)
    for n, ((label, counts), colour) in enumerate(zip(found.items(), COLOURS, strict=True)):
        places = [i + (n - (len(found) - 1) / 2) * width for i in range(len(totals))]
        bars = axis.bar(places, counts, width, color=colour, label=label)
        axis.bar_label(bars, padding=2, fontsize=9, color="0.25")
    axis.set_xticks(range(len(totals)), [f"sum {t}" for t in totals])
    axis.set_title("Distinct right answers, 256 samples")
    axis.margins(y=0.12)
