"""``python -m convergence.long_run OUT``: thousands of steps, patched beside plain torch, on a GPU in bf16.

Three runs from the same weights on the same batches: plain; plain again, with every weight moved by one unit in its
last place; patched. The second shows how far rounding alone drives two runs apart, and the patched one must stay as
near to the first. Writes long_run.json, long_run.csv and long_run.png to OUT; the exit status is the verdict.
"""

from __future__ import annotations

import argparse
import csv
import json
import platform
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import transformers
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from liger_entropy.demo.text import batches, encode, read_corpus, train_tokenizer

from .objectives import patched, plain
from .training import PRECISIONS, Trajectory, Weights, nudge_weights, optimize


@dataclass(frozen=True)
class Size:
    """The default: 13 million parameters, 4096 tokens a step."""

    steps: int = 2000
    hidden: int = 384
    layers: int = 4
    vocabulary: int = 8192
    batch: int = 16
    length: int = 256
    evaluate_every: int = 50


TINY = Size(steps=20, hidden=32, layers=1, vocabulary=600, batch=2, length=32, evaluate_every=5)


@dataclass
class Run:
    trajectory: Trajectory = field(default_factory=Trajectory)
    held_out: list[float] = field(default_factory=list)  # cross-entropy in nats, after every evaluate_every steps
    seconds: float = 0.0


def build(size: Size) -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=8 * size.hidden // 3 // 16 * 16,
        num_hidden_layers=size.layers,
        num_attention_heads=max(1, size.hidden // 64),
        max_position_embeddings=size.length,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return AutoModelForCausalLM.from_config(config)


def run(size: Size, text: tuple[Tensor, Tensor], device: str, objective_of, nudge: bool = False) -> Run:
    """One run; the held-out cross-entropy is taken from the model's logits in every run."""
    model = build(size)
    if nudge:
        nudge_weights(model)
    model.to(device).train()
    weights, result = Weights(model, torch.bfloat16), Run()
    objective = objective_of(model)
    data = ((ids, ids) for ids in batches(text[0], size.batch, size.length, seed=0))
    held_out = next(batches(text[1], size.batch, size.length, seed=1)).to(device)

    def look(step: int) -> None:
        if (step + 1) % size.evaluate_every == 0:
            result.held_out.append(_cross_entropy(model, held_out))

    start = time.perf_counter()
    optimize(weights, objective, PRECISIONS["bf16"], device, size.steps, data, result.trajectory, look)
    result.seconds = time.perf_counter() - start
    return result


@torch.no_grad()
def _cross_entropy(model: PreTrainedModel, ids: Tensor) -> float:
    logits = model.eval()(input_ids=ids).logits[:, :-1]
    model.train()
    return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten()).item()


def judge(runs: dict[str, Run]) -> dict[str, float | bool]:
    """Differences from the plain run over the second half of the held-out evaluations, when runs have drifted apart.

    The patched run may be twice as far as the nudged one, in RMS and in its mean: the figures of one pair of runs are
    themselves that uncertain.
    """

    def differences(name: str) -> Tensor:
        a, b = (torch.tensor(runs[n].held_out, dtype=torch.float64) for n in (name, "plain"))
        return (a - b)[len(a) // 2 :]

    noise, drift = differences("plain, nudged"), differences("patched")
    noise_rms, drift_rms = (d.square().mean().sqrt().item() for d in (noise, drift))
    return {
        "noise_rms": noise_rms,
        "noise_mean": noise.mean().item(),
        "patched_rms": drift_rms,
        "patched_mean": drift.mean().item(),
        "within_noise": drift_rms <= 2 * noise_rms and abs(drift.mean().item()) <= 2 * noise_rms,
    }


def write(out: Path, size: Size, runs: dict[str, Run], verdict: dict, device: str) -> None:
    out.mkdir(parents=True, exist_ok=True)
    environment = {
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.machine(),
        "python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__,
    }  # fmt: skip
    final = {name: {"held_out": r.held_out[-1], "seconds": r.seconds} for name, r in runs.items()}
    content = {"environment": environment, "size": asdict(size), "final": final, "verdict": verdict}
    (out / "long_run.json").write_text(json.dumps(content, indent=2) + "\n")
    with (out / "long_run.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["step", *(f"{field} {name}" for field in ("loss", "entropy") for name in runs)])
        columns = [getattr(r.trajectory, field) for field in ("loss", "entropy") for r in runs.values()]
        rows.writerows([step, *(f"{v:.6g}" for v in values)] for step, values in enumerate(zip(*columns, strict=True)))
    draw(out / "long_run.png", size, runs)


def draw(path: Path, size: Size, runs: dict[str, Run]) -> None:
    figure = Figure(figsize=(12, 4), layout="constrained")
    loss, difference = figure.subplots(1, 2)
    steps = [size.evaluate_every * (i + 1) for i in range(len(runs["plain"].held_out))]
    for number, (name, r) in enumerate(runs.items()):
        loss.plot(steps, r.held_out, label=name, linewidth=6 / (number + 1), alpha=0.8)
        if name != "plain":
            differences = [a - b for a, b in zip(r.held_out, runs["plain"].held_out, strict=True)]
            difference.plot(steps, differences, label=name)
    loss.set(title="held-out cross-entropy, nats", xlabel="step")
    difference.set(title="difference from plain", xlabel="step")
    difference.axhline(0, color="black", linewidth=0.5)
    for axes in (loss, difference):
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=80)


def train_all(size: Size, device: str) -> dict[str, Run]:
    corpus = read_corpus(None)
    tokenizer = train_tokenizer(corpus.train, size.vocabulary)
    text = encode(tokenizer, corpus.train), encode(tokenizer, corpus.held_out)
    runs = {}
    for name, arguments in (("plain", (plain(),)), ("plain, nudged", (plain(), True)), ("patched", (patched(),))):
        runs[name] = run(size, text, device, *arguments)
        print(f"{name}: {runs[name].seconds:.0f} s, held out {runs[name].held_out[-1]:.4f}", flush=True)
    return runs


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m convergence.long_run", description=__doc__.split("\n\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, help="instead of the size's own")
    parser.add_argument("--tiny", action="store_true", help="a model and a length for trying the script on a CPU")
    arguments = parser.parse_args()
    size = TINY if arguments.tiny else Size()
    if arguments.steps:
        size = Size(**{**asdict(size), "steps": arguments.steps})
    device = "cuda" if torch.cuda.is_available() else "cpu"
    runs = train_all(size, device)
    verdict = judge(runs)
    write(arguments.out, size, runs, verdict, device)
    print(json.dumps(verdict, indent=2))
    return 0 if verdict["within_noise"] else 1


if __name__ == "__main__":
    sys.exit(main())
