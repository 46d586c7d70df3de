"""Runs checks in three gloo processes, started once for the whole directory, and keeps what every check said.

A check is a function ``check(ranks)`` that every rank calls in the same order; its name says what fails when it fails.
A rank that raises does not stop the others: they run into the time limit of a collective and go on with the next check.
"""

from __future__ import annotations

import fcntl
import importlib
import inspect
import json
import sys
import tempfile
import traceback
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing

WORLD = 3
LIMIT = timedelta(seconds=180)  # of one collective; ranks that share two busy cores can be a minute apart


class Ranks(NamedTuple):
    """The group that a check runs in."""

    group: dist.ProcessGroup
    rank: int
    size: int


def checks(module: str) -> dict:
    """The checks of a module by name, with the numbers of ranks that each runs on."""
    found = vars(importlib.import_module(module)).items()
    own = {n: f for n, f in found if inspect.isfunction(f) and f.__module__ == module and not n.startswith("_")}
    return {n: f for n, f in own.items() if list(inspect.signature(f).parameters) == ["ranks"]}


def sizes(check) -> tuple[int, ...]:
    return getattr(check, "sizes", (WORLD,))


def on(*numbers: int):
    def mark(check):
        check.sizes = numbers
        return check

    return mark


def names(module: str) -> list[str]:
    return [f"{name}[{size}]" for name, check in checks(module).items() for size in sizes(check)]


def results(modules: list[str], folder: Path) -> dict[str, list[str]]:
    """Tracebacks of each check, one per rank that failed. Test processes that share the folder share the run."""
    with open(folder / "ranks.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        said = folder / "ranks.json"
        if not said.exists():
            said.write_text(json.dumps(_run(modules)))
        return json.loads(said.read_text())


def _run(modules: list[str]) -> dict[str, list[str]]:
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank, (modules, folder), nprocs=WORLD)
        parts = [json.loads(Path(folder, str(rank)).read_text()) for rank in range(WORLD)]
    return {name: [part[name] for part in parts if part.get(name)] for name in parts[0]}


def _rank(rank: int, modules: list[str], folder: str) -> None:
    sys.modules["__main__"].__dict__.pop("__file__", None)
    torch.set_num_threads(1)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD, timeout=LIMIT)
    said = {}
    for module in modules:
        for name, check in checks(module).items():
            for size in sizes(check):
                said[f"{name}[{size}]"] = _said(check, rank, size)
    Path(folder, str(rank)).write_text(json.dumps(said))
    dist.barrier()
    dist.destroy_process_group()


def _said(check, rank: int, size: int) -> str:
    """A fresh group each time: what a failed check left behind in the old one meets nobody."""
    group = dist.new_group(range(size), timeout=LIMIT)
    if rank >= size:
        return ""
    torch.manual_seed(0)
    try:
        check(Ranks(group, rank, size))
    except Exception:
        return f"rank {rank}: {traceback.format_exc()}"
    return ""
