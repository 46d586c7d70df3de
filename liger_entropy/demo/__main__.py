"""Command line of the demo."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from .experiment import Experiment
from .model import PRESETS
from .picture import draw
from .report import comparison, memory_table, results_table
from .training import patched_objective, plain_objective


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m liger_entropy.demo",
        description="Train a small language model on real text and see where it is unsure. Needs no network.",
    )
    option = parser.add_argument
    option("--steps", type=_at_least(1), default=400, help="training steps (default: %(default)s)")
    option("--entropy-coef", type=float, default=0.01, help="weight of the entropy bonus (default: %(default)s)")
    option("--model", default="tiny", help=f"{', '.join(PRESETS)}, a config.json, or a folder with a pretrained model")
    option("--text", type=Path, help="file or folder to learn from (default: the sources of Python's standard library)")
    option("--batch", type=_at_least(1), default=8, help="sequences per step (default: %(default)s)")
    option("--length", type=_at_least(2), default=128, help="tokens per sequence (default: %(default)s)")
    option("--compare", action="store_true", help="train the unpatched model as well, from the same seed")
    option("--out", type=Path, default=Path("demo_out"), help="folder for entropy.png (default: %(default)s)")
    options = parser.parse_args(arguments)
    if options.text and not options.text.exists():
        parser.error(f"argument --text: {options.text} does not exist")
    if options.out.exists() and not options.out.is_dir():
        parser.error(f"argument --out: {options.out} is not a folder")
    return options


def _at_least(minimum: int) -> Callable[[str], int]:
    def integer(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = minimum - 1
        if value < minimum:
            raise argparse.ArgumentTypeError(f"{text!r} is no integer of at least {minimum}")
        return value

    return integer


def main(arguments: list[str] | None = None) -> None:
    options, console = parse_arguments(arguments), Console()
    try:
        experiment = Experiment(options, console)
    except ValueError as error:
        sys.exit(f"python -m liger_entropy.demo: error: {error}")
    console.print(experiment.description())
    patched, model = experiment.run("patched", patched_objective)
    plain = experiment.run("unpatched", plain_objective)[0] if options.compare else None
    console.print(results_table(patched, plain), memory_table(experiment.logits_memory()))
    if plain:
        console.print(comparison(patched.history, plain.history))
    options.out.mkdir(parents=True, exist_ok=True)
    picture = options.out / "entropy.png"
    draw(experiment.story(model, patched, plain), picture)
    console.print(f"Picture: {picture}")


if __name__ == "__main__":
    main()
