"""``python -m liger_entropy.demo_rl``: GRPO on a verifiable text task, with and without an entropy bonus."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from . import task
from .picture import draw
from .training import History, Recipe, distinct_right_answers, train

TOTALS = [12, 16, 20, 24]
LAST = 20  # steps that the table's means are taken over


def main() -> None:
    arguments = _arguments()
    arguments.out.mkdir(parents=True, exist_ok=True)
    console, runs, found = Console(), {}, {}
    for label, target in (("no bonus", None), ("entropy bonus", arguments.target_entropy)):
        recipe = Recipe(steps=arguments.steps, target_entropy=target, seed=arguments.seed)
        policy, runs[label] = _with_progress(console, label, recipe)
        found[label] = [len(distinct_right_answers(policy, total)) for total in TOTALS]
    console.print(_table(runs, found))
    path = arguments.out / "grpo.png"
    draw(runs, found, TOTALS, arguments.target_entropy, path)
    console.print(f"picture: {path}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m liger_entropy.demo_rl", description=__doc__)
    parser.add_argument("--steps", type=int, default=Recipe.steps)
    parser.add_argument("--target-entropy", type=float, default=1.0, help="nats per token that the bonus holds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("demo_out"))
    return parser.parse_args()


def _with_progress(console: Console, label: str, recipe: Recipe):
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    columns = (*columns, TextColumn("reward {task.fields[reward]:.2f}  entropy {task.fields[entropy]:.2f}"))
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task(f"{label:13}", total=recipe.steps, reward=0.0, entropy=0.0)

        def on_step(history: History) -> None:
            progress.update(bar, advance=1, reward=history.reward[-1], entropy=history.entropy[-1])

        return train(recipe, on_step)


def _table(runs: dict[str, History], found: dict[str, list[int]]) -> Table:
    table = Table(title=f"Means over the last {LAST} steps, and distinct right answers in 256 samples")
    for name in ("", "reward", "right", "entropy", "coef", *(f"sum {t}" for t in TOTALS)):
        table.add_column(name, justify="left" if not name else "right", no_wrap=True)
    for label, history in runs.items():
        series = (history.reward, history.right, history.entropy, history.coef)
        means = [sum(values[-LAST:]) / len(values[-LAST:]) for values in series]
        table.add_row(label, *(f"{m:.3f}" for m in means), *map(str, found[label]))
    possible = [f"of {task.answers(total)}" for total in TOTALS]
    table.add_row("possible", "", "", "", "", *possible, style="dim")
    return table


if __name__ == "__main__":
    main()
