"""``python -m convergence.noise [CLASS ...]``: how far rounding alone drives plain training, beside the bounds.

Every draw moves each weight by one unit in its last place; what comes of it is what any other order of additions makes
too. Prints the largest deviation over the draws, and what part of its bound that is; ``--out`` writes it to a file.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import torch

from .classes import CLASSES, EquivalenceClass
from .compare import FIELDS, deviation

DRAWS = 5


def noise(cls: EquivalenceClass, draws: int, device: str) -> dict[str, dict[str, float]]:
    """The largest deviation of each kind by field."""
    plain = cls.members["plain"]
    members = {"plain": plain} | {str(seed): replace(plain, nudge=seed) for seed in range(1, draws + 1)}
    varied = replace(cls, members=members)
    runs = {name: varied.run(name, device) for name in members}
    found = {f: [vars(deviation(runs["plain"], runs[str(s)], f)) for s in range(1, draws + 1)] for f in FIELDS}
    largest = {field: {kind: max(abs(d[kind]) for d in all_) for kind in all_[0]} for field, all_ in found.items()}
    return {field: {kind: float(f"{size:.1e}") for kind, size in kinds.items()} for field, kinds in largest.items()}


def show(cls: EquivalenceClass, found: dict[str, dict[str, float]]) -> None:
    for field, sizes in found.items():
        bound = vars(cls.bounds[field])
        kinds = (f"{kind} {size:.1e} ({size / bound[kind]:.0%})" for kind, size in sizes.items() if bound[kind])
        print(f"{cls.name:22}{field:12}", "  ".join(kinds), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m convergence.noise", description=__doc__.split("\n\n")[0])
    parser.add_argument("classes", nargs="*", metavar="CLASS", help="default: all that no interpreter trains")
    parser.add_argument("--draws", type=int, default=DRAWS)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = {}
    for name in arguments.classes or [name for name in CLASSES if not name.endswith("kernels")]:
        found[name] = noise(CLASSES[name], arguments.draws, arguments.device)
        show(CLASSES[name], found[name])
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
