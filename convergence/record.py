"""``python -m convergence.record [CLASS ...]``: train the classes; write references/CLASS.json and .png, and the page
with all their figures."""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import platform
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path

import torch
import transformers

from .classes import CLASSES
from .compare import FIELDS, deviation, violations
from .data import text
from .plot import draw
from .table import table
from .training import Trajectory

REFERENCES = Path(__file__).parent / "references"


def environment() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": platform.machine(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "text": text().digest,
    }


def record(name: str) -> str:
    """Train one class and write its reference; a line for the screen."""
    torch.set_num_threads(1)
    cls = CLASSES[name]
    runs = {member: cls.run(member) for member in cls.members}
    plain = runs["plain"]
    deviations = {m: {f: asdict(deviation(plain, run, f)) for f in FIELDS} for m, run in runs.items() if m != "plain"}
    write(REFERENCES / f"{name}.json", {
        "environment": environment(),
        "members": deviations,
        "plain": asdict(plain),
    })  # fmt: skip
    draw(cls, runs, REFERENCES / f"{name}.png")
    broken = [f"\n  {m}: {line}" for m, run in runs.items() for line in violations(plain, run, cls.bounds)]
    return f"{name}: {len(runs)} members" + "".join(broken)


def write(path: Path, content: dict) -> None:
    """JSON with the nine digits that fp32 needs, one line for every list or leaf dict: a changed field is one line."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(_json(content, "") + "\n")


def _json(value, indent: str) -> str:
    if isinstance(value, dict) and any(isinstance(v, (dict, list)) for v in value.values()):
        inner = indent + "  "
        items = (f"{inner}{json.dumps(key)}: {_json(item, inner)}" for key, item in value.items())
        return "{\n" + ",\n".join(items) + f"\n{indent}}}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)}: {_json(item, indent)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_json(item, indent) for item in value) + "]"
    return f"{value:.9g}" if isinstance(value, float) else json.dumps(value)


def recorded(name: str) -> tuple[dict[str, str], Trajectory]:
    """Environment and plain trajectory of a reference."""
    content = json.loads((REFERENCES / f"{name}.json").read_text())
    return content["environment"], Trajectory(**content["plain"])


def digest() -> str:
    """Names the references: with any change of them it is another, and the changelog must say why."""
    files = sorted(REFERENCES.glob("*.json"))
    return hashlib.sha256(b"".join(path.name.encode() + path.read_bytes() for path in files)).hexdigest()[:12]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m convergence.record", description=__doc__)
    parser.add_argument("classes", nargs="*", metavar="CLASS", help=f"default: all of {', '.join(CLASSES)}")
    names = parser.parse_args().classes or list(CLASSES)
    unknown = [name for name in names if name not in CLASSES]
    if unknown:
        parser.error(f"unknown class {unknown[0]}; there are {', '.join(CLASSES)}")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=multiprocessing.get_context("spawn")) as pool:
        for line in pool.map(record, names):
            print(line, flush=True)
    (REFERENCES / "README.md").write_text(table(REFERENCES))
    print(f"CHANGELOG.md needs a line: - Convergence references `{digest()}`: WHY THEY CHANGED.")


if __name__ == "__main__":
    main()
