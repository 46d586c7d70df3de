"""The demo's picture: the curves of the run, and a passage with the entropy of every token drawn over it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from .text import Passage
from .training import History

COLUMNS, LINES = 80, 32
COLORS = {"cross_entropy": "#1f5fa8", "entropy": "#d1495b"}  # of a history's two series
INK, FAINT = "#1c1c1c", "#8a8a8a"
# The darkest quarter of the map is left out, so that black letters stay readable on every token.
COLORMAP = LinearSegmentedColormap.from_list("unsure", matplotlib.colormaps["YlOrRd"](np.linspace(0.0, 0.72, 256)))


@dataclass(frozen=True)
class Story:
    """All that the picture tells."""

    title: str
    vocab_size: int
    patched: History
    plain: History | None
    passage: Passage
    entropies: list[float]


class Cell(NamedTuple):
    line: int
    column: int
    character: str
    token: int


def draw(story: Story, path: Path) -> None:
    with matplotlib.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(10, 11.5), layout="constrained")
        top, bottom = np.asarray(figure.subfigures(2, 1, height_ratios=[3, 8]))
        top.suptitle(story.title, fontsize=10, color=FAINT, x=0.01, ha="left")
        if story.plain:
            left, right = top.subplots(1, 2, width_ratios=[3, 1])
            _draw_differences(right, story)
        else:
            left = top.subplots()
        _draw_curves(left, story)
        _draw_passage(bottom.subplots(), story)
        figure.savefig(path, dpi=140)


def _draw_curves(axes: Axes, story: Story) -> None:
    steps, uniform = np.arange(1, len(story.patched.entropy) + 1), math.log(story.vocab_size)
    dotted: dict = dict(color=INK, linewidth=1, linestyle=(0, (2, 3)))
    for name, color in COLORS.items():
        values = np.array(getattr(story.patched, name))
        axes.plot(steps, values, color=color, linewidth=0.8, alpha=0.3)
        axes.plot(steps, _smooth(values), color=color, linewidth=2, label=name.replace("_", "-"))
        if story.plain:
            axes.plot(steps, _smooth(np.array(getattr(story.plain, name))), **dotted)
    if story.plain:
        axes.plot([], [], label="the same, unpatched", **dotted)
    axes.axhline(uniform, color=FAINT, linewidth=1, linestyle=":")
    note = f"log V = {uniform:.2f}: every token equally likely"
    axes.text(steps[-1], uniform, note, color=FAINT, ha="right", va="bottom")
    axes.set(xlabel="step", ylabel="nats per token", ylim=(0, None), xlim=(1, max(2, steps[-1])))
    axes.set_title("How unsure the model is while it learns", loc="left", fontweight="bold")
    axes.legend(frameon=False, loc="lower left", ncols=3)


def _draw_differences(axes: Axes, story: Story) -> None:
    """Of the runs with and without the patch; steps without any are drawn at the lower end of the axis."""
    for name, color in COLORS.items():
        difference = np.abs(np.subtract(getattr(story.patched, name), getattr(story.plain, name)))
        axes.semilogy(np.arange(1, len(difference) + 1), np.maximum(difference, 1e-8), color=color, linewidth=1)
    axes.set(xlabel="step", ylabel="nats", ylim=(1e-8, None))
    axes.set_title("|patched - unpatched|", loc="left", fontweight="bold")


def _smooth(values: np.ndarray, window: int = 15) -> np.ndarray:
    """Mean over the steps around each one; fewer at both ends."""
    sums = np.cumsum(np.insert(values, 0, 0.0))
    low = np.maximum(np.arange(len(values)) - window // 2, 0)
    high = np.minimum(np.arange(len(values)) + window // 2 + 1, len(values))
    return (sums[high] - sums[low]) / (high - low)


def lay_out(passage: Passage) -> Iterator[Cell]:
    """A cell for every character: lines end where the text's do or wrap; a line end has a cell of its own."""
    line = column = end = 0
    for token, (start, stop) in enumerate(passage.spans):
        # Tokens that share the bytes of one character share its span: the first one has the cell.
        for character in passage.text[max(start, end) : stop]:
            if column == COLUMNS:
                line, column = line + 1, 0
            if line == LINES:
                return
            yield Cell(line, column, "↵" if character == "\n" else character, token)
            line, column = (line + 1, 0) if character == "\n" else (line, column + 1)
        end = max(end, stop)


def _draw_passage(axes: Axes, story: Story) -> None:
    cells = list(lay_out(story.passage))
    values = np.full((cells[-1].line + 1, COLUMNS), np.nan)
    for cell in cells:
        if cell.token:  # nothing predicts the first token, so it has no colour
            values[cell.line, cell.column] = story.entropies[cell.token - 1]
    image = axes.imshow(values, cmap=COLORMAP, vmin=0.0, vmax=math.ceil(np.nanmax(values)), aspect="auto")
    _write(axes, cells)
    _separate_tokens(axes, cells)
    axes.set_axis_off()
    mean = sum(story.entropies) / len(story.entropies)
    title = f"Where it is unsure in text that it never saw: {mean:.2f} nats per token"
    axes.set_title(title, loc="left", fontweight="bold")
    bar = axes.figure.colorbar(image, ax=axes, location="bottom", shrink=0.5, aspect=50, pad=0.02)
    bar.set_label("entropy of the model's guess before it sees the token, in nats")
    bar.outline.set_visible(False)


def _write(axes: Axes, cells: list[Cell]) -> None:
    """Letter by letter: whole lines would drift away from their cells."""
    style: dict = dict(family="monospace", fontsize=12.5, ha="center", va="center_baseline")
    for line, column, character, _ in cells:
        if not character.isspace():
            axes.text(column, line, character, color=FAINT if character == "↵" else INK, **style)


def _separate_tokens(axes: Axes, cells: list[Cell]) -> None:
    starts = [b for a, b in itertools.pairwise(cells) if a.token != b.token and a.line == b.line]
    edges = [[(c.column - 0.5, c.line - 0.5), (c.column - 0.5, c.line + 0.5)] for c in starts]
    axes.add_collection(LineCollection(edges, colors="white", linewidths=1.2))
    axes.hlines(np.arange(cells[-1].line) + 0.5, -0.5, COLUMNS - 0.5, colors="white", linewidths=2)
