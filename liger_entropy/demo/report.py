"""The demo's table, and how its figures were computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from rich.table import Table

from .training import History


@dataclass(frozen=True)
class Run:
    history: History
    held_out_cross_entropy: float
    held_out_entropy: float


class LogitsMemory(NamedTuple):
    """Shapes of the fp32 logits alive at once in a training step."""

    tokens: int
    vocab_size: int
    chunk_tokens: int
    chunk_columns: int


ROWS: dict[str, Callable[[Run], str]] = {
    "training cross-entropy, first step": lambda run: f"{run.history.cross_entropy[0]:.4f}",
    "training cross-entropy, last 20 steps": lambda run: f"{_mean_of_last(run.history.cross_entropy):.4f}",
    "training entropy, first step": lambda run: f"{run.history.entropy[0]:.4f}",
    "training entropy, last 20 steps": lambda run: f"{_mean_of_last(run.history.entropy):.4f}",
    "held-out cross-entropy": lambda run: f"{run.held_out_cross_entropy:.4f}",
    "held-out entropy": lambda run: f"{run.held_out_entropy:.4f}",
    "milliseconds per step": lambda run: f"{1e3 * run.history.seconds / len(run.history.entropy):.0f}",
}


def results_table(patched: Run, plain: Run | None) -> Table:
    table = Table(title="Training (cross-entropy and entropy in nats per token)", title_justify="left")
    runs = {"patched": patched} if plain is None else {"patched": patched, "unpatched": plain}
    table.add_column("")
    for name in runs:
        table.add_column(name, justify="right")
    for label, cell in ROWS.items():
        table.add_row(label, *map(cell, runs.values()))
    return table


def memory_table(memory: LogitsMemory) -> Table:
    """Computed from shapes: the logits and nothing else, neither their log-softmax nor their gradient."""
    table = Table(title="Peak logits memory of a training step (tokens x classes x 4 bytes)", title_justify="left")
    table.add_column("")
    table.add_column("tokens x classes", justify="right")
    table.add_column("MiB", justify="right")
    full, chunk = 4 * memory.tokens * memory.vocab_size, 4 * memory.chunk_tokens * memory.chunk_columns
    table.add_row("unpatched: all logits", f"{memory.tokens} x {memory.vocab_size}", _mebibytes(full))
    table.add_row("patched: one chunk", f"{memory.chunk_tokens} x {memory.chunk_columns}", _mebibytes(chunk))
    table.add_row("avoided", f"{full / chunk:.1f} times less", _mebibytes(full - chunk))
    return table


def comparison(patched: History, plain: History) -> str:
    differences = (
        _largest_difference(patched.cross_entropy, plain.cross_entropy),
        _largest_difference(patched.entropy, plain.entropy),
    )
    return "Largest difference of the two runs over all steps: cross-entropy {:.1e}, entropy {:.1e} nats".format(
        *differences
    )


def _mean_of_last(values: list[float], count: int = 20) -> float:
    return sum(values[-count:]) / len(values[-count:])


def _largest_difference(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:.1f}"
