"""references/README.md: how far every class's members were from plain training, beside the bounds, and the plots."""

from __future__ import annotations

import json
from pathlib import Path

from .classes import CLASSES, EquivalenceClass
from .compare import FIELDS

_HEAD = """\
# Recorded trajectories

Written by `python -m convergence.record`; see [the page about the classes](../README.md). Each cell: the largest
deviation of a member that runs the library / of plain torch by rounding alone (`-` where no member measures that) / the
bound. The loss, the entropy and the held-out ones are in nats, gradient norms and parameters relative, top logits as
they are.
"""
_KINDS = {
    "size": "Largest difference over the run",
    "mean": "Mean signed difference over the run",
    "early": "Mean signed difference over the first 20 steps",
}


def table(references: Path) -> str:
    """The page for the references in that folder."""
    found = {name: json.loads((references / f"{name}.json").read_text()) for name in CLASSES}
    environment = ", ".join(f"{key} {value}" for key, value in found["llama-fp32"]["environment"].items())
    parts = [_HEAD, f"Environment: {environment}.\n"]
    parts += [_of_kind(kind, title, found) for kind, title in _KINDS.items()]
    parts += ["## Plots\n", *(f"![{name}]({name}.png)\n" for name in CLASSES)]
    return "\n".join(parts)


def _of_kind(kind: str, title: str, found: dict[str, dict]) -> str:
    fields = [f for f in FIELDS if any(vars(cls.bounds[f])[kind] for cls in CLASSES.values())]
    lines = [f"## {title}\n", f"| class | {' | '.join(fields)} |", "|---" * (len(fields) + 1) + "|"]
    for name, cls in CLASSES.items():
        cells = (_cell(cls, found[name]["members"], field, kind) for field in fields)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(cls: EquivalenceClass, members: dict[str, dict], field: str, kind: str) -> str:
    rounding, library = [], []
    for member, deviations in members.items():
        (rounding if member.startswith("plain") else library).append(abs(deviations[field][kind]))
    alone = _short(max(rounding)) if rounding else "-"
    return f"{_short(max(library))} / {alone} / {vars(cls.bounds[field])[kind]:.0e}"


def _short(size: float) -> str:
    return f"{size:.0e}" if size else "0"
