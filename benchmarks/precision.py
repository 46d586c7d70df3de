"""``python -m benchmarks.precision``: error of per-token log-probs by how the logits are made, on a trained model.

Writes benchmarks/results/precision.csv and assets/precision.png. The hidden states and the head are bf16, as in
training; the truth is the same product and softmax in fp64. Then the importance ratio exp(new - old) that policy
gradients take of unchanged weights, when both log-probabilities come from the same hidden states by different chunks,
different splits of the batch, or different precisions.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from liger_entropy import ComputeOptions, linear_token_statistics
from liger_entropy.demo.text import read_corpus, train_tokenizer

ROOT = Path(__file__).parent.parent
LENGTH = 128  # tokens of a sequence


@dataclass
class Trained:
    """Held-out tokens as the head of a trained model meets them: hidden [T, D] and weight [V, D] bf16, target [T]."""

    hidden: Tensor
    weight: Tensor
    target: Tensor

    @property
    def truth(self) -> Tensor:
        z = self.hidden.double() @ self.weight.double().t()
        return z.log_softmax(-1).gather(1, self.target[:, None])[:, 0]


def train(vocab: int, hidden: int, steps: int, sequences: int, device: str = "cpu", seed: int = 0) -> Trained:
    """A small Llama trained on Python's standard library; the last ``sequences`` are held out."""
    text = read_corpus(None).train[: 400 * LENGTH * 8]
    tokenizer = train_tokenizer(text, vocab)
    ids = torch.tensor(tokenizer.encode(text).ids, device=device)
    batches = ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)
    learn, held_out = batches[:-sequences], batches[-sequences:]
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(), hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=LENGTH, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        batch = learn[torch.randint(len(learn), (8,), device=device)]
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        states = model.bfloat16().model(held_out).last_hidden_state[:, :-1]
    return Trained(states.reshape(-1, hidden), model.lm_head.weight.detach(), held_out[:, 1:].reshape(-1))


Method = Callable[[Tensor, Tensor, Tensor], Tensor]  # hidden, weight, target -> logprob [T]


def fused(options: ComputeOptions | None = None) -> Method:
    return lambda x, w, y: linear_token_statistics(x, w, y, options=options).logprob


def _of_logits(z: Tensor, y: Tensor) -> Tensor:
    return z.float().log_softmax(-1).gather(1, y[:, None])[:, 0]


METHODS: dict[str, Method] = {
    "this library": fused(),
    "fp32 head": lambda x, w, y: _of_logits(F.linear(x.float(), w.float()), y),
    "logits staged in fp16": lambda x, w, y: _of_logits(F.linear(x.float(), w.float()).half(), y),
    "bf16 logits": lambda x, w, y: _of_logits(F.linear(x, w), y),
}


def errors(data: Trained) -> dict[str, Tensor]:
    """|logprob - truth| [T] in nats by method."""
    with torch.no_grad():
        truth = data.truth
        return {name: (m(data.hidden, data.weight, data.target).double() - truth).abs() for name, m in METHODS.items()}


def split(method: Method, parts: int) -> Method:
    """The same, called on the batch in parts."""

    def run(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
        return torch.cat([method(a, w, b) for a, b in zip(x.chunk(parts), y.chunk(parts), strict=True)])

    return run


def ratio_deviations(data: Trained) -> dict[str, float]:
    """Largest |exp(new - old) - 1| with old from one call of this library."""
    rows = len(data.target)
    columns = {n: fused(ComputeOptions(chunk_bytes=4 * rows * n)) for n in (2048, 1 << 20)}
    others: dict[str, Method] = {
        "called again": fused(),
        **{f"chunks of {n:,} columns" if n < 1 << 20 else "one chunk": method for n, method in columns.items()},
        **{f"batch in {n} parts": split(fused(), n) for n in (2, 7, 32)},
        **{f"old from {name}": METHODS[name] for name in METHODS if name != "this library"},
    }
    with torch.no_grad():
        new = METHODS["this library"](data.hidden, data.weight, data.target)
        olds = {name: other(data.hidden, data.weight, data.target) for name, other in others.items()}
    return {name: float(((new - old).double().exp() - 1).abs().max()) for name, old in olds.items()}


def write(path: Path, device: str, error: dict[str, Tensor], ratio: dict[str, float]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["device", "quantity", "case", "mean", "p99", "max"])
        for name, e in error.items():
            numbers = (e.mean(), e.quantile(0.99), e.max())
            table.writerow([device, "logprob error (nats)", name, *(f"{float(n):.3g}" for n in numbers)])
        for name, deviation in ratio.items():
            table.writerow([device, "|ratio - 1|", name, "", "", f"{deviation:.3g}"])


def draw(path: Path, error: dict[str, Tensor], ratio: dict[str, float]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4), width_ratios=(1, 1.1))
    colours = dict(zip(error, ("#2b6f8f", "#7fb0a0", "#d9a441", "#c2543a"), strict=True))
    for name, e in error.items():
        e = e.cpu().clamp(min=1e-12).sort().values
        left.plot(e, torch.linspace(0, 1, len(e)), color=colours[name], linewidth=2, label=name)
    left.set(xscale="log", xlim=(1e-12, 1), ylim=(0, 1), xlabel="error of a token's log-prob, nats")
    left.set_title("Share of tokens with a smaller error")
    left.legend(frameon=False, loc="upper left")
    floor = 1e-8  # drawn for a deviation of exactly 0
    names, values = list(ratio)[::-1], [max(v, floor) for v in list(ratio.values())[::-1]]
    shades = [colours[n.removeprefix("old from ")] if n.startswith("old") else colours["this library"] for n in names]
    right.hlines(names, floor, values, color=shades, linewidth=1.5)
    right.scatter(values, names, color=shades, s=36, zorder=3)
    for name, value in zip(names, values, strict=True):
        right.text(value * 1.6, name, "exactly 0" if value == floor else f"{value:.1g}", va="center", color="0.3")
    right.set(xscale="log", xlim=(floor, 3), title="Largest |exp(new - old) - 1|, unchanged weights")
    figure.tight_layout(w_pad=2)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.precision", description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    data = train(4096, 128, arguments.steps, sequences=32, device=arguments.device)
    error, ratio = errors(data), ratio_deviations(data)
    write(ROOT / "benchmarks/results/precision.csv", arguments.device, error, ratio)
    draw(ROOT / "assets/precision.png", error, ratio)
    print((ROOT / "benchmarks/results/precision.csv").read_text())


if __name__ == "__main__":
    main()
