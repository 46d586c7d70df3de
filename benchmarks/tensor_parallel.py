"""The head on several GPUs: correctness against one rank, then time, memory and communication.

    torchrun --nproc-per-node 2 benchmarks/tensor_parallel.py --out benchmarks/results/tensor_parallel.csv
    torchrun --nproc-per-node 2 benchmarks/tensor_parallel.py --check 40x16x70 --shapes 64x16x70 --repeat 2

The second runs anywhere: without a GPU the ranks talk over gloo. Schemes: ``one`` (all tokens and the whole weight on
every GPU, no communication), ``tp`` (rows of the weight spread over the ranks), ``sequence`` (tokens spread, weight
replicated, its gradient averaged), ``fsdp`` (tokens spread, weight sharded by FSDP2), and with the same shards as tp
``verl`` and ``liger``, where they are installed and run.
Shapes are TOKENSxHIDDENxVOCABULARY. Every figure is the slowest or largest of the ranks.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass, fields
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from liger_entropy import linear_cross_entropy, linear_token_statistics

MiB = 1 << 20
ENTROPY = 0.01
STATE_FIELDS = 7  # fp32 numbers per token in the all-gather of statistics


@dataclass
class Row:
    """One line of the table. communication_ms is the time of the scheme's collectives alone, overlapped or not."""

    device: str
    ranks: int
    scheme: str
    tokens: int
    hidden: int
    vocab: int
    dtype: str
    forward_ms: float
    step_ms: float
    against_one: float
    peak_mib: float
    communication_ms: float
    communication_mib: float


@dataclass
class World:
    rank: int
    size: int
    device: torch.device

    @classmethod
    def start(cls) -> World:
        cuda = torch.cuda.is_available()
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
        if cuda:
            torch.cuda.set_device(device)
        for name, value in dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="29511").items():
            os.environ.setdefault(name, value)  # also without torchrun
        dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
        return cls(dist.get_rank(), dist.get_world_size(), device)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def largest(self, value: float) -> float:
        tensor = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return tensor.item()

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)

    def part(self, size: int) -> slice:
        """This rank's share of a dimension, as equal as can be."""
        return slice(size * self.rank // self.size, size * (self.rank + 1) // self.size)


def tensors(world: World, tokens: int, hidden: int, vocab: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x [T, D], w [V, D], y [T], the same on every rank, with an entropy between 0 and log V."""
    generator = torch.Generator(world.device).manual_seed(0)
    x = torch.randn(tokens, hidden, generator=generator, device=world.device)
    w = torch.randn(vocab, hidden, generator=generator, device=world.device) * (2.0 / hidden**0.5)
    y = torch.randint(0, vocab, (tokens,), generator=generator, device=world.device)
    return x.to(dtype), w.to(dtype), y


def uneven(world: World, vocab: int) -> slice:
    """Shards in the proportion 1 : 2 : 3 ..."""
    ends = [vocab * r * (r + 1) // (world.size * (world.size + 1)) for r in range(world.size + 1)]
    return slice(ends[world.rank], ends[world.rank + 1])


# Correctness


def solve(x: Tensor, w: Tensor, y: Tensor, group, smoothing: float) -> list[Tensor]:
    """logprob, entropy, dx, dw."""
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    s = linear_token_statistics(x, w, y, process_group=group)
    loss = linear_cross_entropy(x, w, y, process_group=group, label_smoothing=smoothing, entropy_coef=ENTROPY)
    loss.backward()
    return [s.logprob.detach(), s.entropy.detach(), x.grad, w.grad]


def exact(x: Tensor, w: Tensor, y: Tensor, smoothing: float) -> list[Tensor]:
    """The same from full logits in fp64."""
    x, w = x.double().requires_grad_(), w.double().requires_grad_()
    log_p = torch.log_softmax(x @ w.t(), dim=-1)
    entropy = -(log_p.exp() * log_p).sum(dim=-1)
    loss = nn.functional.cross_entropy(x @ w.t(), y, label_smoothing=smoothing) - ENTROPY * entropy.mean()
    loss.backward()
    return [log_p.gather(1, y[:, None])[:, 0].detach(), entropy.detach(), x.grad, w.grad]


def check(world: World, shape: tuple[int, int, int], dtype: torch.dtype) -> bool:
    """Errors against fp64 with sharded rows must not exceed those of one rank by more than 5 % and rounding."""
    good = True
    world.say(f"correctness at {shape}, {dtype}: largest error against fp64 of one rank, and of {world.size}")
    x, w, y = tensors(world, *shape, dtype)
    y[::7] = shape[2] - 1
    for smoothing in (0.0, 0.1):
        truth, one = exact(x, w, y, smoothing), solve(x, w, y, None, smoothing)
        for split in (world.part(shape[2]), uneven(world, shape[2])):
            sharded = solve(x, w[split], y, dist.group.WORLD, smoothing)
            for name, t, a, b in zip(("logprob", "entropy", "dx", "dw"), truth, one, sharded, strict=True):
                cut = split if name == "dw" else slice(None)
                single = world.largest((a.double() - t).abs().max().item())
                error = world.largest((b.double() - t[cut]).abs().max().item() if b.numel() else 0.0)
                passed = error <= 1.05 * single + 1e-5 * t.abs().max().item()
                good &= passed
                verdict = "" if passed else "  WRONG"
                kind = "equal" if split == world.part(shape[2]) else "uneven"
                world.say(f"  smoothing {smoothing:.1f} {kind:6} {name:8} {single:.2e} {error:.2e}{verdict}")
    return good


# Time


def median_ms(world: World, call: Callable[[], object], repeat: int) -> float:
    """Median of the calls; each starts when every rank is there. The slowest rank counts."""
    times = []
    for trial in range(repeat + 2):
        dist.barrier()
        world.synchronize()
        start = time.perf_counter()
        call()
        world.synchronize()
        if trial > 1:
            times.append((time.perf_counter() - start) * 1e3)
    return world.largest(statistics.median(times))


def peak_mib(world: World, call: Callable[[], object]) -> float:
    """Beyond what was allocated before, gradients included."""
    if world.device.type != "cuda":
        return 0.0
    world.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    world.synchronize()
    return world.largest((torch.cuda.max_memory_allocated() - before) / MiB)


class Scheme:
    """A way to spread the head. ``loss`` is the forward; ``collectives`` are what it adds up to, alone."""

    def __init__(self, world: World, x: Tensor, w: Tensor, y: Tensor):
        self.world, self.y = world, y
        self.x, self.w = x.detach().requires_grad_(), w.detach().requires_grad_()

    def loss(self) -> Tensor:
        return linear_cross_entropy(self.x, self.w, self.y, entropy_coef=ENTROPY)

    def step(self) -> None:
        self.x.grad = self.w.grad = None
        self.loss().backward()

    def collectives(self) -> list[tuple[Callable, Tensor, int]]:
        """Collective, buffer of this rank, bytes that this rank sends."""
        return []

    def all_reduced(self, *shape: int, dtype: torch.dtype) -> tuple[Callable, Tensor, int]:
        buffer = torch.zeros(shape, dtype=dtype, device=self.world.device)
        sent = 2 * buffer.numel() * buffer.element_size() * (self.world.size - 1) // self.world.size
        return dist.all_reduce, buffer, sent

    def all_gathered(self, *shape: int, dtype: torch.dtype) -> tuple[Callable, Tensor, int]:
        part = torch.zeros(shape, dtype=dtype, device=self.world.device)
        whole = part.new_empty(self.world.size * shape[0], *shape[1:])
        sent = part.numel() * part.element_size() * (self.world.size - 1)
        return lambda buffer: dist.all_gather_into_tensor(whole, buffer), part, sent


class TensorParallel(Scheme):
    def __init__(self, world, x, w, y):
        super().__init__(world, x, w[world.part(len(w))].clone(), y)

    def loss(self):
        return linear_cross_entropy(self.x, self.w, self.y, entropy_coef=ENTROPY, process_group=dist.group.WORLD)

    def collectives(self):
        states = self.all_gathered(STATE_FIELDS, len(self.x), dtype=torch.float32)
        return [states, self.all_reduced(*self.x.shape, dtype=torch.float32)]


class SequenceParallel(Scheme):
    def __init__(self, world, x, w, y):
        mine = world.part(len(x))
        super().__init__(world, x[mine].clone(), w, y[mine].clone())

    def loss(self):
        return linear_cross_entropy(self.x, self.w, self.y, entropy_coef=ENTROPY, reduction_group=dist.group.WORLD)

    def step(self):
        super().step()
        dist.all_reduce(self.w.grad)
        self.w.grad.div_(self.world.size)

    def collectives(self):
        return [self.all_reduced(*self.w.shape, dtype=self.w.dtype)]


class Head(nn.Module):
    """Computes its loss inside its own call, where FSDP has gathered the weight."""

    def __init__(self, w: Tensor):
        super().__init__()
        self.weight = nn.Parameter(w)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return linear_cross_entropy(x, self.weight, y, entropy_coef=ENTROPY, reduction_group=dist.group.WORLD)


class FullySharded(SequenceParallel):
    def __init__(self, world, x, w, y):
        super().__init__(world, x, w, y)
        self.head = fully_shard(Head(w.clone()))
        self.w = self.head.weight

    def loss(self):
        return self.head(self.x, self.y)

    def step(self):
        self.head.zero_grad()
        self.x.grad = None
        self.loss().backward()

    def collectives(self):
        rows, hidden = -(-self.w.shape[0] // self.world.size), self.w.shape[1]
        whole = torch.zeros(rows * self.world.size, hidden, dtype=self.w.dtype, device=self.world.device)
        part = whole.new_empty(rows, hidden)
        sent = part.numel() * part.element_size() * (self.world.size - 1)
        gathered = self.all_gathered(rows, hidden, dtype=self.w.dtype)
        return [gathered, gathered, (lambda buffer: dist.reduce_scatter_tensor(part, buffer), whole, sent)]


class Verl(TensorParallel):
    """Its callers sum the gradient of hidden."""

    def loss(self):
        from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy as theirs

        logprobs, entropy = theirs(self.x, self.w, self.y, 1.0, "none", dist.group.WORLD)
        return -logprobs.mean() - ENTROPY * entropy.mean()

    def step(self):
        super().step()
        dist.all_reduce(self.x.grad)


class Liger(TensorParallel):
    def loss(self):
        from liger_kernel.ops.fused_linear_scaled_cross_entropy import LigerFusedLinearScaledCrossEntropyTPFunction

        apply = LigerFusedLinearScaledCrossEntropyTPFunction.apply
        nll, entropy = apply(self.x, self.w, self.y, dist.group.WORLD, return_entropy=True)
        return nll.mean() - ENTROPY * entropy.mean()


SCHEMES = dict(
    one=Scheme, tp=TensorParallel, sequence=SequenceParallel, fsdp=FullySharded, verl=Verl, liger=Liger
)  # fmt: skip


def measure(world: World, name: str, shape: tuple[int, int, int], dtype: torch.dtype, repeat: int) -> Row:
    scheme = SCHEMES[name](world, *tensors(world, *shape, dtype))

    def forward() -> None:
        scheme.loss()

    forward_ms, step_ms = median_ms(world, forward, repeat), median_ms(world, scheme.step, repeat)
    scheme.x.grad = scheme.w.grad = None
    memory = peak_mib(world, scheme.step)
    collectives = scheme.collectives() if world.size > 1 else []

    def communicate() -> None:
        for collective, buffer, _ in collectives:
            collective(buffer)

    communication = median_ms(world, communicate, repeat) if collectives else 0.0
    sent = sum(size for *_, size in collectives) / MiB
    device = torch.cuda.get_device_name() if world.device.type == "cuda" else "cpu"
    return Row(device, world.size, name, *shape, str(dtype)[6:], forward_ms, step_ms, 0.0, memory, communication, sent)


def timings(world: World, shape, dtype, names: list[str], repeat: int) -> list[Row]:
    rows: list[Row] = []
    for name in names:
        try:
            rows.append(measure(world, name, shape, dtype, repeat))
        except (ImportError, RuntimeError, ValueError) as error:
            world.say(f"  {name}: does not run here: {str(error).splitlines()[0]}")
            continue
        rows[-1].against_one = rows[-1].step_ms / rows[0].step_ms
        r = rows[-1]
        world.say(
            f"  {r.scheme:9} forward {r.forward_ms:8.2f} ms  step {r.step_ms:8.2f} ms = {r.against_one:.3f} of one  "
            f"peak {r.peak_mib:7.0f} MiB  communication {r.communication_ms:6.2f} ms, {r.communication_mib:7.1f} MiB"
        )
    return rows


def write(path: str, rows: list[Row]) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(field.name for field in fields(Row))
        table.writerows([f"{v:.4g}" if isinstance(v, float) else v for v in astuple(row)] for row in rows)


def shape_of(text: str) -> tuple[int, int, int]:
    tokens, hidden, vocab = map(int, text.split("x"))
    return tokens, hidden, vocab


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=shape_of, nargs="*", default=[(8192, 4096, 128256), (2048, 4096, 131072)])
    parser.add_argument("--check", type=shape_of, default=(1000, 512, 8190), help="shape of the correctness check")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--schemes", nargs="*", choices=list(SCHEMES), default=list(SCHEMES))
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--out", help="CSV file")
    return parser.parse_args()


def main() -> None:
    options, world = arguments(), World.start()
    dtype = getattr(torch, options.dtype)
    good, rows = check(world, options.check, dtype), []
    names = ["one", *(name for name in options.schemes if name != "one")]
    for shape in options.shapes:
        world.say(f"{world.size} ranks at {shape}, {options.dtype}")
        rows += timings(world, shape, dtype, names, options.repeat)
    if options.out and world.rank == 0:
        write(options.out, rows)
    dist.destroy_process_group()
    if not good:
        raise SystemExit("the sharded head is less exact than one rank")


if __name__ == "__main__":
    main()
