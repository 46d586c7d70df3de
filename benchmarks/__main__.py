"""Side by side: python -m benchmarks [--out DIR] [--rounds N] [--device cpu|cuda]

On CUDA: time (forward alone, forward and backward), peak memory beyond the gradients and error of every implementation
that is installed, over T at one vocabulary and over V at one T. On CPU: this library beside plain torch at one size.
Writes benchmark_cuda.csv (or benchmark_cpu.csv), with the environment in its first line, and draws the plots.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import platform
from collections.abc import Iterator
from pathlib import Path

import torch

from .cpu import cpu_rows
from .data import Head, make_head
from .implementations import IMPLEMENTATIONS, Missing
from .timing import Timer, peak_bytes

HIDDEN = 4096
TOKENS, VOCABULARIES = (1024, 2048, 4096, 8192, 16384), (32000, 65536, 128256, 256000)
AT_TOKENS, AT_VOCAB = 8192, 128256
FIELDS = ("implementation", "tokens", "hidden", "vocab", "dtype", "forward_ms", "step_ms", "extra_mib", "nll_error",
          "entropy_error", "note")  # fmt: skip


def shapes() -> list[tuple[int, int]]:
    return sorted({(t, AT_VOCAB) for t in TOKENS} | {(AT_TOKENS, v) for v in VOCABULARIES})


def upstream(outputs, head: Head):
    """Arbitrary gradients per token; 1 for an implementation that gives one number."""
    return [
        (g if o.ndim else torch.ones_like(o)).to(o)
        for o, g in zip(outputs, (head.g_logprob, head.g_entropy), strict=False)
    ]


def functions(statistics, head: Head):
    def forward():
        with torch.no_grad():
            statistics(head.x, head.w, head.y)

    def step():
        outputs = [o for o in statistics(head.x, head.w, head.y) if o is not None]
        torch.autograd.grad(outputs, [head.x, head.w], upstream(outputs, head))

    return forward, step


def errors(statistics, head: Head, rows: int = 256) -> tuple[float | str, float | str]:
    """Largest distance from fp64 over the first rows."""
    with torch.no_grad():
        logprob, entropy = statistics(head.x, head.w, head.y)
        exact = (head.x[:rows].double() @ head.w.double().t()).log_softmax(-1)
        chosen = exact.gather(1, head.y[:rows, None])[:, 0]
        nll = (logprob[:rows] - chosen).abs().max().item() if logprob.ndim else ""
        if entropy is None:
            return nll, ""
        return nll, (entropy[:rows] + (exact.exp() * exact).sum(-1)).abs().max().item()


def cuda_rows(rounds: int) -> Iterator[dict]:
    device = torch.device("cuda")
    timer = Timer(device, rounds)
    for tokens, vocab in shapes():
        head = make_head(tokens, HIDDEN, vocab, device)
        runnable, notes = {}, {}
        for name, make in IMPLEMENTATIONS.items():
            try:
                statistics = make()
                functions(statistics, head)[1]()
                runnable[name] = statistics
            except Missing as missing:
                notes[name] = str(missing)
            except Exception as error:
                notes[name] = f"failed: {(str(error).splitlines() or [repr(error)])[0][:120]}"
        times = timer.medians({f"{n}|{i}": f for n, s in runnable.items() for i, f in enumerate(functions(s, head))})
        base = {"tokens": tokens, "hidden": HIDDEN, "vocab": vocab, "dtype": "bfloat16"}
        for name, statistics in runnable.items():
            extra = peak_bytes(functions(statistics, head)[1], device) - head.gradient_bytes
            nll, entropy = errors(statistics, head)
            yield {
                **base, "implementation": name, "forward_ms": times[f"{name}|0"], "step_ms": times[f"{name}|1"],
                "extra_mib": extra / 2**20, "nll_error": nll, "entropy_error": entropy,
            }  # fmt: skip
        yield from ({**base, "implementation": name, "note": note} for name, note in notes.items())
        del head, runnable
        torch.cuda.empty_cache()


def environment(device: str) -> str:
    name = (
        torch.cuda.get_device_name()
        if device == "cuda"
        else f"{platform.processor() or platform.machine()} CPU, {torch.get_num_threads()} threads"
    )
    return f"# {name}, torch {torch.__version__}, {datetime.date.today()}, python -m benchmarks --device {device}"


def show(row: dict) -> None:
    def cell(value):
        return f"{value:.4g}" if isinstance(value, float) else str(value)

    print("  ".join(f"{cell(row.get(field, '')):>12}" for field in FIELDS[1:]), row["implementation"], flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / f"benchmark_{arguments.device}.csv"
    print("  ".join(f"{field:>12}" for field in FIELDS[1:]), "implementation")
    with path.open("w", newline="") as file:
        file.write(environment(arguments.device) + "\n")
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        for row in cuda_rows(arguments.rounds) if arguments.device == "cuda" else cpu_rows(arguments.rounds):
            writer.writerow(row)
            file.flush()
            show(row)
    if arguments.device == "cuda":
        from .plot import draw

        draw(path, arguments.out)


if __name__ == "__main__":
    main()
