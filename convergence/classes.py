"""The equivalence classes and their members."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from transformers import PreTrainedModel

from liger_entropy import ComputeOptions

from .compare import BF16, BF16_UNSTEADY, FP32, FP32_UNSTEADY, Deviation
from .models import CONFIGS
from .objectives import EveryOption, exact_head, patched, plain
from .training import Objective, Trajectory, train

STEPS = 100
# An interpreted step takes seconds.
INTERPRETED_STEPS = 3
CACHE_ALL = ComputeOptions(cache_bytes=1 << 40)
CACHE_NOTHING = ComputeOptions(cache_bytes=0)
# Models in whose bf16 runs flipped roundings grow.
UNSTEADY = ("qwen3", "mixtral", "gpt2")
# transformers takes a lock in the one and logs in the other while the model runs, which breaks the graph there.
BREAKING = ("mixtral", "gpt2")
# Beside zero; the last one is negative and sharpens.
ENTROPY_COEFFICIENTS = (0.05, 0.1, 0.2, -0.1)


@dataclass(frozen=True)
class Member:
    objective_of: Callable[[PreTrainedModel], Objective]
    nudge: int = 0  # the seed, see train
    interpreted: bool = False  # trained in a process of its own, in which Triton interprets the kernels


@dataclass(frozen=True)
class EquivalenceClass:
    """``members`` train the same thing; the first, "plain", is what the others are compared with."""

    name: str
    model: str
    precision: str
    members: dict[str, Member]
    bounds: dict[str, Deviation]
    steps: int = STEPS

    def run(self, member: str, device: str = "cpu") -> Trajectory:
        how = self.members[member]
        if how.interpreted and os.environ.get("TRITON_INTERPRET") != "1":
            return _in_interpreter(self.name, member)
        return train(self.model, how.objective_of, self.steps, self.precision, device, how.nudge)


def _in_interpreter(name: str, member: str) -> Trajectory:
    """Triton reads TRITON_INTERPRET when it is imported, so this process is too late."""
    command = [sys.executable, "-m", "convergence.classes", name, member]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run(command, env=environment, cwd=root, stdout=subprocess.PIPE, text=True, check=True)
    return Trajectory(**json.loads(done.stdout))


def _of_model(model: str, precision: str) -> EquivalenceClass:
    compiler = "inductor" if model == "llama" else "aot_eager"
    bounds = FP32 if precision == "fp32" else BF16_UNSTEADY if model in UNSTEADY else BF16
    members = {
        "plain": Member(plain()),
        "plain, nudged": Member(plain(), nudge=1),
        "patched": Member(patched(options=CACHE_NOTHING)),
        "patched, all cached": Member(patched(options=CACHE_ALL)),
        "patched, compiled": Member(patched(compiler=compiler, fullgraph=model not in BREAKING)),
    }
    if precision == "bf16":
        members["plain, fp32 head"] = Member(exact_head)
    return EquivalenceClass(f"{model}-{precision}", model, precision, members, bounds)


def _of_every_option(name: str, model: str, precision: str = "fp32") -> EquivalenceClass:
    objective = EveryOption()
    members = {
        "plain": Member(objective.plain),
        "plain, nudged": Member(objective.plain, nudge=1),
        "fused": Member(objective.fused(CACHE_NOTHING)),
        "fused, all cached": Member(objective.fused(CACHE_ALL)),
    }
    bounds = BF16_UNSTEADY if precision == "bf16" else FP32_UNSTEADY if model == "gpt2" else FP32
    return EquivalenceClass(f"every-option-{name}", model, precision, members, bounds)


def _of_entropy(coefficient: float) -> EquivalenceClass:
    members = {"plain": Member(plain(coefficient)), "patched": Member(patched(coefficient))}
    bounds = FP32 if coefficient > 0 else FP32_UNSTEADY
    return EquivalenceClass(f"entropy{coefficient:+}", "llama", "fp32", members, bounds)


def _of_kernels(name: str, model: str, expected: Member, of: Callable[[ComputeOptions], Member]) -> EquivalenceClass:
    members = {"plain": expected}
    for member, cache_bytes in (("triton", 0), ("triton, all cached", 1 << 40)):
        members[member] = of(ComputeOptions(backend="triton", chunk_bytes=1, cache_bytes=cache_bytes))
    return EquivalenceClass(f"{name}-kernels", model, "fp32", members, FP32, INTERPRETED_STEPS)


def _of_patched_kernels(model: str) -> EquivalenceClass:
    return _of_kernels(model, model, Member(plain(0.1)), lambda o: Member(patched(0.1, o), interpreted=True))


def _of_every_option_kernels() -> EquivalenceClass:
    objective = EveryOption()
    return _of_kernels(
        "every-option", "llama", Member(objective.plain), lambda o: Member(objective.fused(o), interpreted=True)
    )


def _of_autocast() -> EquivalenceClass:
    members = {"plain": Member(plain()), "plain, nudged": Member(plain(), nudge=1), "patched": Member(patched())}
    return EquivalenceClass("llama-autocast", "llama", "autocast", members, BF16)


CLASSES = {
    c.name: c
    for c in (
        *(_of_model(model, precision) for model in CONFIGS for precision in ("fp32", "bf16")),
        _of_autocast(),
        *(_of_every_option(precision, "llama", precision) for precision in ("fp32", "bf16")),
        *(_of_every_option(model, model) for model in CONFIGS if model != "llama"),
        *(_of_entropy(coefficient) for coefficient in ENTROPY_COEFFICIENTS),
        *(_of_patched_kernels(model) for model in ("llama", "gemma2")),
        _of_every_option_kernels(),
    )
}


if __name__ == "__main__":
    print(json.dumps(asdict(CLASSES[sys.argv[1]].run(sys.argv[2]))))
