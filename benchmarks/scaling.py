"""How long the head takes on many GPUs, from what one product and one link were measured to give.

    python benchmarks/scaling.py                      # the table, and which scheme to choose
    python benchmarks/scaling.py --tokens 32768 --vocab 151936 --gpus 8 --link 200 --csv scaling.csv

A step is the forward and backward of one batch of T tokens, D hidden size, V vocabulary on G GPUs:

    tp        every GPU: all T tokens, V/G rows     sends 28 T (G-1) bytes of statistics, all-reduces 4 T D bytes of dx
    sequence  every GPU: T/G tokens, all V rows     all-reduces 2 V D bytes of dw
    both      a grid of tp x sequence GPUs          both, each over its own dimension

Compute is ``products * 2 T D V / G`` operations at ``--tflops`` and ``--picoseconds`` per logit for everything else; an
all-reduce of n bytes over g GPUs takes ``2 n (g-1)/g / link``. tp lies inside a node as far as it fits. Nothing is
taken to overlap. Below about 2 ms launches on the host, which the model leaves out, take over. Measured steps of
benchmarks/tensor_parallel.py stand beside the predictions they test.
"""

from __future__ import annotations

import argparse
import csv
from dataclasses import asdict, dataclass
from pathlib import Path

MEASURED = Path(__file__).parent / "results" / "tensor_parallel.csv"
GiB = 1 << 30
STATE_BYTES = 28  # 7 fp32 numbers per token


@dataclass(frozen=True)
class Machine:
    """What was measured. Defaults: H200, bf16, cuBLAS: one 8192 x 4096 x 128256 product in 13 ms; a step of 4 products
    took 54.4 ms, so that everything else costs 2.3 ps per logit. Links: NVLink 4 and one 400 Gb/s port per GPU, at
    the fraction of their rate that NCCL's large all-reduces usually reach; not measured here."""

    tflops: float = 660.0
    picoseconds: float = 2.3
    products: float = 4.0  # 3 with all logits kept
    link: float = 360.0  # GB/s that a GPU sends inside a node
    network: float = 45.0  # GB/s that a GPU sends to other nodes
    latency: float = 30.0  # microseconds per collective
    node: int = 8
    memory: float = 141.0  # GB

    def compute_ms(self, tokens: float, hidden: int, columns: float) -> float:
        operations = self.products * 2.0 * tokens * hidden * columns
        return operations / self.tflops * 1e-9 + tokens * columns * self.picoseconds * 1e-9

    def send_ms(self, sent: float, gpus: int, neighbours: int) -> float:
        """A collective over `gpus`, each sending that many bytes, of which `neighbours` are in one node: between nodes
        they use all their ports at once."""
        if gpus == 1:
            return 0.0
        rate = self.link if neighbours >= gpus else min(self.link, self.network * neighbours)
        return sent / rate * 1e-6 + self.latency * 1e-3


@dataclass(frozen=True)
class Step:
    """A prediction."""

    tokens: int
    hidden: int
    vocab: int
    gpus: int
    tp: int
    compute_ms: float
    tp_ms: float  # communication over the ranks that share the vocabulary
    sequence_ms: float  # and over those that share the weight's rows
    memory_gib: float  # head, its gradient, hidden states and theirs, on one GPU

    @property
    def step_ms(self) -> float:
        return self.compute_ms + self.tp_ms + self.sequence_ms

    @property
    def scheme(self) -> str:
        if self.gpus == 1:
            return "one"
        return (
            "sequence" if self.tp == 1 else "tp" if self.tp == self.gpus else f"both {self.tp}x{self.gpus // self.tp}"
        )


def predict(m: Machine, tokens: int, hidden: int, vocab: int, gpus: int, tp: int) -> Step:
    """`tp` ranks share the vocabulary, gpus / tp groups of them share the tokens."""
    groups = gpus // tp
    rows, columns = tokens / groups, vocab / tp
    states, dx = STATE_BYTES * rows * (tp - 1), 2 * 4.0 * rows * hidden * (tp - 1) / tp
    dw = 2 * 2.0 * columns * hidden * (groups - 1) / groups
    inside = min(tp, m.node)
    tp_ms = m.send_ms(states, tp, inside) + m.send_ms(dx, tp, inside)
    sequence_ms = m.send_ms(dw, groups, max(1, m.node // tp))
    memory = (2 * 2.0 * columns * hidden + (2 + 4 + 2) * rows * hidden + STATE_BYTES * rows * (tp + 1)) / GiB
    compute = m.compute_ms(rows, hidden, columns)
    return Step(tokens, hidden, vocab, gpus, tp, compute, tp_ms, sequence_ms, memory)


def choices(m: Machine, tokens: int, hidden: int, vocab: int, gpus: int) -> list[Step]:
    """Every grid, sequence parallel first and tp last."""
    sizes = [size for size in range(1, gpus + 1) if gpus % size == 0]
    return [predict(m, tokens, hidden, vocab, gpus, tp) for tp in sizes]


def best(m: Machine, steps: list[Step]) -> Step:
    """The fastest that fits into the memory; the smallest if none does."""
    fitting = [step for step in steps if step.memory_gib * GiB < m.memory * 1e9]
    return min(fitting, key=lambda s: s.step_ms) if fitting else min(steps, key=lambda s: s.memory_gib)


def measured(path: Path) -> dict[tuple, float]:
    """Milliseconds by (scheme, gpus, tokens, hidden, vocab), of GPUs only."""
    if not path.exists():
        return {}
    with open(path, newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["device"] != "cpu"]
    names = ("ranks", "tokens", "hidden", "vocab")
    return {(row["scheme"], *(int(row[n]) for n in names)): float(row["step_ms"]) for row in rows}


def key(step: Step) -> tuple:
    return step.scheme, step.gpus, step.tokens, step.hidden, step.vocab


def cell(step: Step, seen: dict[tuple, float]) -> str:
    """Predicted milliseconds, and measured ones in brackets."""
    real = seen.get(key(step))
    return f"{step.step_ms:.2f}" + ("" if real is None else f" [{real:.2f}]")


def table(m: Machine, options: argparse.Namespace, seen: dict[tuple, float]) -> list[Step]:
    """Prints one block per vocabulary; gives the steps that were chosen."""
    chosen = []
    for vocab in options.vocab:
        print(f"\nV = {vocab}, D = {options.hidden}: ms per step, predicted [measured]")
        print(
            f"{'T':>9} {'GPUs':>5} {'tp':>18} {'sequence':>18} {'best':>9}  {'choose':12} {'GiB/GPU':>8} {'sent ms':>8}"
        )
        for tokens in options.tokens:
            for gpus in options.gpus:
                steps = choices(m, tokens, options.hidden, vocab, gpus)
                pick = best(m, steps)
                chosen.append(pick)
                print(
                    f"{tokens:9} {gpus:5} {cell(steps[-1], seen):>16} {cell(steps[0], seen):>16} {pick.step_ms:8.2f}  "
                    f"{pick.scheme:11} {pick.memory_gib:8.2f} {pick.tp_ms + pick.sequence_ms:8.2f}"
                )
    return chosen


def compare(m: Machine, seen: dict[tuple, float]) -> None:
    """Every measured step beside its prediction, whatever the table's shapes are."""
    rows = [(name, *numbers, ms) for (name, *numbers), ms in seen.items() if name in ("one", "tp", "sequence")]
    if not rows:
        print(f"\nNo measured steps: {MEASURED} has none of a GPU.")
        return
    print(f"\n{'measured':9} {'GPUs':>5} {'T':>8} {'D':>6} {'V':>7} {'ms':>9} {'predicted':>9} {'ratio':>6}")
    for name, gpus, tokens, hidden, vocab, ms in rows:
        count = 1 if name == "one" else gpus
        step = predict(m, tokens, hidden, vocab, count, count if name == "tp" else 1)
        print(
            f"{name:9} {gpus:5} {tokens:8} {hidden:6} {vocab:7} {ms:9.2f} {step.step_ms:9.2f} {ms / step.step_ms:6.2f}"
        )


ADVICE = """
Which to choose, other things being equal:
* compute is the same for all; what differs is what is sent: tp 8 T D bytes of dx in fp32, sequence 4 V D bytes of dw.
  So tp where fewer than V/2 tokens meet in one step (long vocabularies, short batches), sequence where more do;
* tp's sum is in the way of the layers below, while dw's can wait for the end of the backward: at equal bytes sequence,
  and tp across nodes only for few tokens;
* both where the weight, its gradient and the optimizer's state must be cut and T is large: tp inside the node,
  sequence across nodes, where only the gradient of V/tp rows travels;
* data parallel training averages dw anyway: then sequence costs nothing more, and tp only buys memory.
"""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 65536, 262144, 1048576])
    parser.add_argument("--vocab", type=int, nargs="+", default=[32000, 128256, 262144, 524288])
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--gpus", type=int, nargs="+", default=[2, 4, 8, 16, 32, 64])
    for name, value in asdict(Machine()).items():
        parser.add_argument(f"--{name}", type=type(value), default=value, help=f"of the machine, {value:g}")
    parser.add_argument("--measured", type=Path, default=MEASURED, help="CSV of benchmarks/tensor_parallel.py")
    parser.add_argument("--csv", type=Path, help="write the chosen steps")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    machine = Machine(**{name: getattr(options, name) for name in asdict(Machine())})
    seen = measured(options.measured)
    chosen = table(machine, options, seen)
    compare(machine, seen)
    print(ADVICE)
    if options.csv:
        with open(options.csv, "w", newline="") as file:
            rows = [asdict(step) | dict(step_ms=step.step_ms, scheme=step.scheme) for step in chosen]
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
