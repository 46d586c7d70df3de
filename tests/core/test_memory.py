"""What is kept for the backward, and what is ever allocated. Cases MEM-02 to MEM-08."""

import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from problems import all_losses, problem
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from liger_entropy import ComputeOptions, engine, gradients, linear_cross_entropy
from liger_entropy.notices import warn_once

ROOT = Path(__file__).parents[2]


class Recorder(TorchDispatchMode):
    """Every tensor that an operation inside the engine makes with storage of its own."""

    def __init__(self):
        super().__init__()
        self.made: list[tuple[int, torch.dtype]] = []
        self.operations = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        self.operations += 1
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in given:
                self.made.append((tensor.numel(), tensor.dtype))
        return out

    @property
    def largest(self) -> int:
        return max(n for n, _ in self.made)


@pytest.fixture
def recorder(monkeypatch):
    """Custom operators run below every dispatch mode, so the recorder is switched on inside the engine."""
    recorder = Recorder()
    for module, name in ((engine.Forward, "__init__"), (engine.Forward, "finish"), (gradients, "backward")):
        original = getattr(module, name)

        def recording(*arguments, _original=original):
            with recorder:
                return _original(*arguments)

        monkeypatch.setattr(module, name, recording)
    return recorder


def saved(function) -> list[torch.Tensor]:
    tensors = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: tensors.append(t) or t, lambda t: t):
        function()
    return tensors


def test_entropy_is_computed_when_nobody_asks(recorder):
    """MEM-02"""
    p = problem(32, 16, 3000).leaves()
    counts = []
    for coefficient in (0.0, 0.1):
        recorder.operations = 0
        linear_cross_entropy(p.input, p.linear_weight, p.target, entropy_coef=coefficient).backward()
        counts.append(recorder.operations)
    assert counts[0] < counts[1]


@pytest.mark.parametrize("entropy_coef", [0.0, 0.1])
@pytest.mark.parametrize("ignored", [0.0, 0.5])
def test_logits_are_saved_for_backward(ignored, entropy_coef):
    """MEM-03: at most the inputs and a dozen numbers a token."""
    tokens, hidden, vocab = 64, 16, 5000
    p = problem(tokens, hidden, vocab, ignored=ignored, entropy_coef=entropy_coef, lse_square_scale=0.1).leaves()
    total = sum(t.numel() for t in saved(lambda: all_losses(p)))
    assert total <= tokens * hidden + vocab * hidden + 32 * tokens


def test_cache_exceeds_its_budget():
    """MEM-03: a budget in bytes is kept to the byte."""
    p = problem(64, 16, 5000, ignored=0).leaves()
    inputs = {t.untyped_storage()._cdata for t in (p.input, p.linear_weight)}
    for budget in (0, 64 * 4 * 1024, 64 * 4 * 2500, 64 * 4 * 5000, 1 << 30):
        tensors = saved(lambda b=budget: all_losses(p, ComputeOptions(cache_bytes=b)))
        own = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
        kept = sum(n for storage, n in own.items() if storage not in inputs)
        whole = 64 * 4 * 5000
        assert kept <= min(budget, whole) + 200 * 64
        assert kept >= min(budget, whole) // (64 * 4 * 1024) * (64 * 4 * 1024)


def test_cache_that_cannot_be_allocated_is_left_out_silently(monkeypatch):
    allocate = engine.empty_aligned

    def scarce(like, rows, columns, dtype):
        if columns:
            raise torch.OutOfMemoryError
        return allocate(like, rows, columns, dtype)

    p = problem(6, 4, 5000)
    monkeypatch.setattr(engine, "empty_aligned", scarce)
    warn_once.cache_clear()
    with pytest.warns(UserWarning, match="no memory for the cache"):
        found = all_losses(p, ComputeOptions(cache_bytes=1 << 30))
    assert torch.equal(found["loss"], all_losses(p, ComputeOptions(cache_bytes=0))["loss"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_cache_of_half_inputs_exceeds_its_budget(dtype):
    """It holds fp32 where the products are made in fp32."""
    p = problem(64, 16, 5000, dtype, ignored=0).leaves()
    budget = 64 * 4 * 2048
    tensors = saved(lambda: all_losses(p, ComputeOptions(cache_bytes=budget)))
    cached = [t.untyped_storage().nbytes() for t in tensors if t.shape == (64, 2048)]
    assert cached == [budget]


def test_room_for_cached_chunks_that_cannot_be_allocated_raises(monkeypatch):
    """They become as narrow as the others."""
    p, options, rooms = problem(6, 4, 5000).leaves(), ComputeOptions(cache_bytes=1 << 30, chunk_bytes=1), []
    buffer = gradients.Buffer

    def scarce(like, bounds, dtype):
        rooms.append(max((stop - start for start, stop in bounds), default=0))
        if rooms[-1] > 1024:
            raise torch.OutOfMemoryError
        return buffer(like, bounds, dtype)

    def solved():
        loss = linear_cross_entropy(p.input, p.linear_weight, p.target, entropy_coef=0.1, options=options)
        return torch.autograd.grad(loss, [p.input, p.linear_weight])

    expected = solved()
    monkeypatch.setattr(gradients, "Buffer", scarce)
    warn_once.cache_clear()
    with pytest.warns(UserWarning, match="narrow chunks"):
        found = solved()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
    assert max(rooms) > 1024 and rooms[-1] == 1024


def test_room_of_the_chunks_is_kept_while_the_input_gradient_is_rounded(monkeypatch):
    """The accumulator and the gradient are there together then, the most memory of all where D is large."""
    rooms, held, make, put = [], [], gradients.Buffer, gradients.put
    monkeypatch.setattr(gradients, "Buffer", lambda *a: rooms.append(weakref.ref(b := make(*a))) or b)
    monkeypatch.setattr(gradients, "put", lambda *a: held.append([r() for r in rooms]) or put(*a))
    x, w, y = torch.randn(8, 8, requires_grad=True), torch.randn(3000, 8), torch.arange(8)
    linear_cross_entropy(x, w, y, options=ComputeOptions(cache_bytes=1 << 15)).backward()
    assert held and all(len(alive) == 2 and not any(alive) for alive in held)


def test_frozen_head_allocates_a_weight_gradient(recorder):
    """MEM-04"""
    p = problem(32, 64, 4096, ignored=0).leaves()
    p.linear_weight.requires_grad_(False)
    linear_cross_entropy(p.input, p.linear_weight, p.target, entropy_coef=0.1).backward()
    assert recorder.largest < 4096 * 64


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_holds_logits_or_gradients(mode, recorder):
    """MEM-05"""
    p = problem(64, 64, 16384, ignored=0).leaves()
    with mode():
        all_losses(p)
    assert recorder.largest <= 64 * 1024


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_weight_is_widened_as_a_whole(dtype, recorder):
    """MEM-06: in fp32 only a chunk of the weight and of the logits, and [T, D]."""
    tokens, hidden, vocab = 64, 32, 16384
    p = problem(tokens, hidden, vocab, dtype, ignored=0).leaves()
    linear_cross_entropy(p.input, p.linear_weight, p.target, entropy_coef=0.1).backward()
    wide = max(n for n, made in recorder.made if made == torch.float32)
    assert wide <= 1024 * max(tokens, hidden)
    assert sum(n == vocab * hidden for n, _ in recorder.made) == 1  # dw itself


def test_forwards_in_flight_hold_weight_sized_memory():
    """MEM-08: what k forwards keep beyond their inputs grows with T only."""
    p = problem(64, 16, 5000, ignored=0).leaves()
    inputs = {t.untyped_storage()._cdata for t in (p.input, p.linear_weight)}
    alive = []
    tensors = saved(lambda: alive.extend(all_losses(p)["loss"] for _ in range(5)))
    own = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    assert sum(n for storage, n in own.items() if storage not in inputs) <= 5 * 200 * 64


PEAK = """
import sys, torch
from liger_entropy import linear_cross_entropy

def status(field):  # in bytes; ru_maxrss would start at the peak of the process that forked this one
    line = next(l for l in open("/proc/self/status") if l.startswith(field))
    return int(line.split()[1]) * 1024

dtype, (T, D, V) = getattr(torch, sys.argv[1]), (2048, 512, 32000)
def step(T, D, V):
    x, w = (torch.randn(n, D).to(dtype).requires_grad_() for n in (T, V))
    t = torch.randint(0, V, (T,))
    before = status("VmRSS")
    out = linear_cross_entropy(x, w, t, entropy_coef=0.1, return_entropy_loss=True)
    out.loss.backward()
    return before, x.grad.nbytes + w.grad.nbytes

step(32, 512, 2048)
before, gradients = step(T, D, V)
peak = status("VmHWM")
assert peak >= before + gradients
print((peak - before - gradients) / (T * V * 4))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_peak_memory_reaches_a_quarter_of_the_logits(dtype):
    """T=2048, D=512, V=32000, in a process of its own: beyond the gradients, less than 1/4 of the fp32 logits."""
    run = subprocess.run([sys.executable, "-c", PEAK, dtype], cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert run.returncode == 0, run.stderr
    assert float(run.stdout) < 0.25
