"""Time and memory against T and against V, from the CSV of `python -m benchmarks`: python -m benchmarks.plot CSV DIR"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

OURS = "liger_entropy"
PANELS = (("step_ms", "forward and backward, ms"), ("extra_mib", "peak memory beyond gradients, MiB"))


def read(path: Path) -> tuple[str, list[dict]]:
    with path.open() as file:
        environment = file.readline().strip("# \n")
        return environment, [row for row in csv.DictReader(file) if row["step_ms"]]


def series(rows: list[dict], axis: str, fixed: str, at: int, field: str) -> dict[str, list[tuple[int, float]]]:
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        if int(row[fixed]) == at and row[field]:
            lines.setdefault(row["implementation"], []).append((int(row[axis]), max(float(row[field]), 1.0)))
    return {name: sorted(points) for name, points in lines.items()}


def draw(path: Path, out: Path) -> None:
    environment, rows = read(path)
    for axis, fixed, at, name in (("tokens", "vocab", 128256, "T"), ("vocab", "tokens", 8192, "V")):
        figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
        for panel, (field, label) in zip(axes, PANELS, strict=True):
            for implementation, points in series(rows, axis, fixed, at, field).items():
                ours = implementation.startswith(OURS)
                panel.plot(*zip(*points, strict=True), marker="o", label=implementation, linewidth=2.4 if ours else 1.2,
                           linestyle="-" if ours else "--", zorder=3 if ours else 2)  # fmt: skip
            panel.set(xscale="log", yscale="log", xlabel=f"{name} ({axis})", ylabel=label)
            ticks = sorted({int(r[axis]) for r in rows if int(r[fixed]) == at})
            panel.set_xticks(ticks, [str(t) for t in ticks], rotation=30)
            panel.minorticks_off()
            panel.grid(alpha=0.3)
        axes[1].legend(fontsize=7, ncols=2)
        figure.suptitle(
            f"D=4096, {'V' if name == 'T' else 'T'}={at}, bf16. {environment.split(', python')[0]}", fontsize=9
        )
        figure.savefig(out / f"against_{name.lower()}.png", dpi=130)
        plt.close(figure)


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(sys.argv[2]))
