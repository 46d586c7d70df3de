"""What the GPU path promises, measured: python -m benchmarks.gpu_limits [--out FILE.csv] [--only NAME ...]

Every row compares two things timed in turn in this process, with the limit it must keep. "Products" are cuBLAS calls
alone on whole matrices: two times ``x w^T`` (once with the cache), ``g w`` and ``g^T x``.
"""

from __future__ import annotations

import argparse
import csv
import datetime
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import triton

from liger_entropy import ComputeOptions, cross_entropy, linear_cross_entropy, linear_token_statistics

from .data import Head, fp64_truth, make_head, relative
from .implementations import liger_flsce, ours, torch_eager
from .timing import Timer, peak_bytes

SHAPES = [(8192, 4096, 128256), (16384, 3584, 152064), (4096, 2048, 151936), (2048, 4096, 131072), (8192, 2304, 256000)]
CUDA = torch.device("cuda")


@dataclass
class Check:
    name: str
    shape: str
    measured: float
    limit: float
    note: str = ""

    @property
    def verdict(self) -> str:
        return "ok" if self.measured <= self.limit else "OVER"


def step(statistics, head: Head) -> Callable[[], None]:
    """Forward and backward with arbitrary upstream gradients of whatever the function gives."""

    def run():
        logprob, entropy = statistics(head.x, head.w, head.y)
        outputs = [logprob] if entropy is None else [logprob, entropy]
        upstream = [head.g_logprob if o.ndim else torch.ones_like(o) for o in outputs[:1]] + [head.g_entropy]
        torch.autograd.grad(outputs, [head.x, head.w], [g.to(o) for g, o in zip(upstream, outputs, strict=False)])

    return run


def products(head: Head, recompute: bool) -> Callable[[], None]:
    x, w = head.x.detach(), head.w.detach()
    z = torch.empty(x.shape[0], w.shape[0], device=x.device, dtype=x.dtype)
    g, dx, dw = torch.randn_like(z), torch.empty_like(x), torch.empty_like(w)

    def run():
        for _ in range(2 if recompute else 1):
            torch.mm(x, w.t(), out=z)
        torch.mm(g, w, out=dx)
        torch.mm(g.t(), x, out=dw)

    return run


def one_product(head: Head) -> Callable[[], None]:
    x, w = head.x.detach(), head.w.detach()
    z = torch.empty(x.shape[0], w.shape[0], device=x.device, dtype=x.dtype)
    return lambda: torch.mm(x, w.t(), out=z)


def check_steps(timer: Timer) -> Iterator[Check]:
    """Items 1 and 2: beside the products, Liger's SM90 kernels, and the memory bound."""
    for shape in SHAPES:
        head, name = make_head(*shape, CUDA), "x".join(map(str, shape))
        functions = {"products4": products(head, True), "recompute": step(ours(cache_bytes=0), head)}
        try:
            functions["liger"] = step(liger_flsce(), head)
            functions["liger"]()
        except Exception as error:
            functions.pop("liger", None)
            print(f"Liger FLSCE: {str(error).splitlines()[0] if str(error) else error!r}")
        t = timer.medians(functions)
        yield Check("no cache / 4 products", name, t["recompute"] / t["products4"], 1.06, f"{t['recompute']:.2f} ms")
        if "liger" in t:
            yield Check("no cache / Liger FLSCE", name, t["recompute"] / t["liger"], 1.02, f"{t['liger']:.2f} ms")
        extra = peak_bytes(functions["recompute"], CUDA) - head.gradient_bytes
        yield Check("extra memory / fp32 logits", name, extra / head.logits_bytes, 0.05, f"{extra / 2**20:.0f} MiB")
        functions = {"products3": products(head, False), "cached": step(ours(cache_bytes=1 << 50), head)}
        t = timer.medians(functions)
        yield Check("full cache / 3 products", name, t["cached"] / t["products3"], 1.06, f"{t['cached']:.2f} ms")
        del functions, head
        torch.cuda.empty_cache()


def check_ignored_and_forward(timer: Timer) -> Iterator[Check]:
    """Items 3 and 4."""
    shape = SHAPES[0]
    name = "x".join(map(str, shape))
    full, half = make_head(*shape, CUDA), make_head(*shape, CUDA, ignored=0.5)

    def forward(head=full):
        with torch.no_grad():
            linear_token_statistics(head.x, head.w, head.y, fields=("logprob", "entropy"))

    def loss(coef: float):
        return lambda: linear_cross_entropy(
            full.x, full.w, full.y, entropy_coef=coef, options=ComputeOptions(cache_bytes=0)
        ).backward()  # fmt: skip

    t = timer.medians(
        {
            "full": step(ours(cache_bytes=0), full), "half": step(ours(cache_bytes=0), half), "forward": forward,
            "product": one_product(full), "loss": loss(0.0), "entropy": loss(0.01),
        }
    )  # fmt: skip
    yield Check("half ignored / none", name, t["half"] / t["full"], 0.56, f"{t['half']:.2f} ms")
    yield Check("forward / 1 product", name, t["forward"] / t["product"], 1.08, f"{t['forward']:.2f} ms")
    yield Check("loss and entropy / loss", name, t["entropy"] / t["loss"], 1.01, f"{t['loss']:.2f} ms")


def check_small(timer: Timer) -> Iterator[Check]:
    """Item 5. The host's share is the time of a call whose device work is negligible."""
    for tokens in (128, 256, 512, 1024):
        head = make_head(tokens, 4096, 128256, CUDA)
        t = timer.medians({"ours": step(ours(), head), "eager": step(torch_eager(), head)})
        yield Check("small / eager", f"{tokens}x4096x128256", t["ours"] / t["eager"], 1.0, f"{t['ours']:.2f} ms")
    tiny = make_head(128, 128, 512, CUDA)
    t = timer.medians({"ours": step(ours(), tiny), "eager": step(torch_eager(), tiny)})
    yield Check("host, ms a step", "128x128x512", t["ours"], float("inf"), f"eager {t['eager']:.2f} ms")


def check_given_logits(timer: Timer) -> Iterator[Check]:
    """Item 6, against the bytes that must move at the bandwidth of a copy."""
    for dtype in (torch.bfloat16, torch.float32):
        tokens, vocab = 8192, 128256
        logits = torch.randn(tokens, vocab, device=CUDA).to(dtype).requires_grad_()
        y = torch.randint(0, vocab, (tokens,), device=CUDA)
        source, target = logits.detach(), torch.empty_like(logits).detach()

        def forward(logits=logits, y=y):
            with torch.no_grad():
                cross_entropy(logits, y, return_entropy_loss=True)

        def both(logits=logits, y=y):
            torch.autograd.grad(cross_entropy(logits, y, entropy_coef=0.01), logits)

        compiled = torch.compile(lambda z, y: torch.nn.functional.cross_entropy(z.float(), y))
        functions = {
            "copy": lambda s=source, d=target: d.copy_(s), "forward": forward, "both": both,
            "torch.compile": lambda z=logits, y=y, f=compiled: torch.autograd.grad(f(z, y), z),
        }  # fmt: skip
        try:
            from liger_kernel.transformers.functional import liger_cross_entropy

            # Liger writes its gradient over the logits; what is timed does not depend on their values.
            functions["liger"] = lambda z=target, y=y: liger_cross_entropy(z.detach().requires_grad_(), y).backward()
        except ImportError:
            pass
        t = timer.medians(functions)
        others = ", ".join(f"{n} {t[n]:.2f} ms" for n in ("torch.compile", "liger") if n in t)
        name = f"{tokens}x{vocab} {str(dtype)[6:]}"
        yield Check(
            "given logits, forward / read", name, t["forward"] / (t["copy"] / 2), 1.15, f"{t['forward']:.2f} ms"
        )
        moved = t["copy"] / 2 * 3
        yield Check(
            "given logits, step / 2 reads, 1 write", name, t["both"] / moved, 1.15, f"{t['both']:.2f} ms; {others}"
        )


def check_errors(timer: Timer) -> Iterator[Check]:
    """The last sentence of item 1, at a size whose fp64 gradients fit."""
    head = make_head(4096, 4096, 128256, CUDA)
    truth, name = fp64_truth(head), "4096x4096x128256"
    errors = {}
    for label, statistics in {
        "ours": ours(cache_bytes=0),
        "cached": ours(cache_bytes=1 << 50),
        "eager": torch_eager(),
    }.items():
        logprob, entropy = statistics(head.x, head.w, head.y)
        assert entropy is not None
        dx, dw = torch.autograd.grad([logprob, entropy], [head.x, head.w], [head.g_logprob, head.g_entropy])
        errors[label] = (
            (logprob - truth.logprob).abs().max().item(), (entropy - truth.entropy).abs().max().item(),
            relative(dx, truth.dx), relative(dw, truth.dw),
        )  # fmt: skip
    for i, field in enumerate(("nll", "entropy")):
        yield Check(f"error of {field}", name, errors["ours"][i], 1e-4, f"torch bf16 {errors['eager'][i]:.1e}")
    for i, field in ((2, "dx"), (3, "dw")):
        for label in ("ours", "cached"):
            yield Check(f"error of {field}, {label}", name, errors[label][i], errors["eager"][i], "limit: torch bf16")


CHECKS = {
    "steps": check_steps,
    "forward": check_ignored_and_forward,
    "small": check_small,
    "logits": check_given_logits,
    "errors": check_errors,
}


def environment(command: str) -> str:
    return (
        f"# {torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}, "
        f"{datetime.date.today()}, {command}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", nargs="+", choices=list(CHECKS), default=list(CHECKS))
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    timer, rows = Timer(CUDA, arguments.rounds), []
    for name in arguments.only:
        for check in CHECKS[name](timer):
            rows.append(check)
            print(
                f"{check.name:40} {check.shape:22} {check.measured:9.4g} {check.limit:8.4g} {check.verdict:5} "
                f"{check.note}",
                flush=True,
            )
        torch.cuda.empty_cache()
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        with arguments.out.open("w", newline="") as file:
            file.write(environment("python -m benchmarks.gpu_limits") + "\n")
            writer = csv.DictWriter(file, [*asdict(rows[0]), "verdict"])
            writer.writeheader()
            writer.writerows({**asdict(row), "verdict": row.verdict} for row in rows)
    return sum(row.verdict == "OVER" for row in rows)


if __name__ == "__main__":
    raise SystemExit(main())
