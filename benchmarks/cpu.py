"""The CPU benchmark: loss and entropy, forward and backward, beside plain torch on full logits."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Iterator

import torch
import torch.nn.functional as F

from liger_entropy import linear_cross_entropy

from .data import make_head
from .timing import Timer

TOKENS, HIDDEN, VOCAB = 2048, 512, 32000
COEFFICIENT = 0.01


def ours(x, w, y):
    return linear_cross_entropy(x, w, y, entropy_coef=COEFFICIENT)


def torch_loss_and_entropy(x, w, y):
    log_p = (x @ w.t()).float().log_softmax(-1)
    return F.nll_loss(log_p, y) + COEFFICIENT * (log_p.exp() * log_p).sum(-1).mean()


def torch_loss(x, w, y):
    return F.cross_entropy((x @ w.t()).float(), y)


LOSSES = {"liger_entropy": ours, "torch, loss and entropy": torch_loss_and_entropy, "torch, loss alone": torch_loss}


def step(name: str, dtype: torch.dtype):
    head = make_head(TOKENS, HIDDEN, VOCAB, torch.device("cpu"), dtype)
    return lambda: torch.autograd.grad(LOSSES[name](head.x, head.w, head.y), [head.x, head.w])


def _peak_beyond_gradients(name: str, dtype: str) -> float:
    """MiB that one step adds to a process of its own, less its gradients: peak resident memory after and before."""
    code = f"from benchmarks.cpu import main; main({name!r}, {dtype!r})"
    return float(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)


def main(name: str, dtype: str) -> None:
    run = step(name, getattr(torch, dtype))
    torch.mm(torch.ones(8, 8), torch.ones(8, 8))  # threads and workspaces of the library
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    gradients = run()
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print((after - before) / 2**10 - sum(g.nbytes for g in gradients) / 2**20)


def cpu_rows(rounds: int) -> Iterator[dict]:
    """fp32, then bf16, once: plain torch's products may take minutes on a processor without bf16 arithmetic."""
    for dtype in (torch.float32, torch.bfloat16):
        timer = Timer(torch.device("cpu"), rounds if dtype == torch.float32 else 1, 1 if dtype == torch.float32 else 0)
        times = timer.medians({name: step(name, dtype) for name in LOSSES})
        for name in LOSSES:
            kind, quick = str(dtype)[6:], dtype == torch.float32 or name == "liger_entropy"
            yield {
                "implementation": name, "tokens": TOKENS, "hidden": HIDDEN, "vocab": VOCAB, "dtype": kind,
                "step_ms": times[name], "extra_mib": _peak_beyond_gradients(name, kind) if quick else "",
                "note": f"liger_entropy / this: {times['liger_entropy'] / times[name]:.2f}",
            }  # fmt: skip
