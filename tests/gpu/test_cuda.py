"""The Triton backend on a CUDA device: `make test-gpu`. Numbers beside fp64 full logits by autograd."""

import contextlib

import pytest
import torch
import torch.nn.functional as F

from liger_entropy import ComputeOptions, cross_entropy, engine, linear_cross_entropy, linear_token_statistics, planner

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
DEVICE = "cuda"


def head(tokens, hidden, vocab, dtype=torch.bfloat16, scale=2.0):
    torch.manual_seed(0)
    x = torch.randn(tokens, hidden, device=DEVICE).to(dtype).requires_grad_()
    w = (torch.randn(vocab, hidden, device=DEVICE) * (scale / hidden**0.5)).to(dtype).requires_grad_()
    y = torch.randint(0, vocab, (tokens,), device=DEVICE)
    return x, w, y, torch.randn(tokens, device=DEVICE), torch.randn(tokens, device=DEVICE)


def gradients(x, w, y, a, b, **options):
    s = linear_token_statistics(x, w, y, options=ComputeOptions(**options))
    return s, *torch.autograd.grad([s.logprob, s.entropy], [x, w], [a, b])


def plain(x, w, y, a, b, dtype):
    """Full logits, products in the dtype of x and w, everything after in `dtype`."""
    keep = y != -100
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    log_p = F.linear(x, w).to(dtype).log_softmax(-1)
    logprob = log_p.gather(1, y.clamp(min=0)[:, None])[:, 0] * keep
    entropy = -(log_p.exp() * log_p).sum(-1) * keep
    return logprob, entropy, *torch.autograd.grad([logprob, entropy], [x, w], [a.to(dtype), b.to(dtype)])


def truth(x, w, y, a, b):
    return plain(x.double(), w.double(), y, a, b, torch.float64)


def relative(value, exact):
    return ((value.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("cache", [0, 1 << 20, 1 << 40])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("vocab", [1, 2, 3, 127, 129, 257, 1000, 1023, 1025, 4097, 32001])
def test_ragged_vocabulary_is_wrong(vocab, dtype, cache):
    """Values within 1e-4 of fp64 in every dtype; gradients at most 1.2 times as far as plain torch's in that dtype."""
    inputs = head(70, 96, vocab, dtype)
    inputs[2][::7] = -100
    s, dx, dw = gradients(*inputs, cache_bytes=cache)
    logprob, entropy, ex, ew = truth(*inputs)
    assert (s.logprob - logprob).abs().max() < 1e-4
    assert (s.entropy - entropy).abs().max() < 1e-4
    _, _, px, pw = plain(*inputs, torch.float32)
    for ours, theirs, exact in ((dx, px, ex), (dw, pw, ew)):
        error = (ours.double() - exact).norm()
        assert error <= 1.2 * (theirs.double() - exact).norm() + 2e-6 * exact.norm() + 1e-9


def every_option(dtype, tokens=300, hidden=128, vocab=1000):
    """x, w, and the rest of linear_token_statistics's tensors; bias masks two classes."""
    x, w, y, *_ = head(tokens, hidden, vocab, dtype)
    y[::5] = -100
    bias, class_weight = torch.randn(vocab, device=DEVICE), torch.rand(vocab, device=DEVICE)
    bias[[1, 3]], class_weight[[1, 3]] = -torch.inf, 0.0
    y[(y == 1) | (y == 3)] = 0
    bias.requires_grad_()
    temperature = torch.rand(tokens, device=DEVICE) + 0.5
    return (x, w, y), dict(linear_bias=bias, class_weight=class_weight, temperature=temperature, logit_scale=1.3)


def exact_statistics(x, w, y, linear_bias, class_weight, temperature, logit_scale, softcap=None):
    z = (x @ w.t() + linear_bias) * logit_scale
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    log_p = (z / temperature[:, None]).log_softmax(-1)
    keep, p = y != -100, log_p.exp()
    values = (
        log_p.gather(1, y.clamp(min=0)[:, None])[:, 0],
        -(p * log_p.masked_fill(p == 0, 0)).sum(-1),
        (z / temperature[:, None]).logsumexp(-1),
        (log_p.masked_fill(class_weight == 0, 0) * class_weight).mean(-1),
    )
    return [v * keep for v in values], torch.where(keep, log_p.argmax(-1), -1)


@pytest.mark.parametrize("cache, skip", [(0, True), (0, False), (300 * 2 * 512, True), (1 << 40, False)])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_statistics_are_wrong_with_every_option(dtype, softcap, cache, skip):
    """All fields and gradients together, several tiles of rows and columns, against fp64 from the same operands."""
    tensors, options = every_option(dtype)
    if softcap is not None:  # a class that the softcap keeps finite has no mask
        options["linear_bias"] = options["linear_bias"].detach().clamp(min=-3).requires_grad_()
    s = linear_token_statistics(
        *tensors, **options, softcap=softcap, options=ComputeOptions(cache_bytes=cache, skip_ignored=skip)
    )
    leaves = [*tensors[:2], options["linear_bias"]]
    upstream = [torch.randn_like(s.logprob) for _ in range(4)]
    ours = torch.autograd.grad([s.logprob, s.entropy, s.lse, s.smooth_logprob], leaves, upstream)
    wide = [t.detach().double().requires_grad_() for t in leaves]
    rest = {n: v.double() if isinstance(v, torch.Tensor) else v for n, v in options.items() if n != "linear_bias"}
    values, prediction = exact_statistics(*wide[:2], tensors[2], wide[2], softcap=softcap, **rest)
    exact = torch.autograd.grad(values, wide, [u.double() for u in upstream])
    for value, expected in zip((s.logprob, s.entropy, s.lse, s.smooth_logprob), values, strict=True):
        assert (value - expected).abs().max() < 1e-4
    assert torch.equal(s.prediction, prediction)
    # A half gradient of the logits has a relative error of 2^-9 in bf16, 2^-12 in fp16; a cached logit as much.
    bound = 8e-3 if dtype == torch.bfloat16 else 2e-3
    for gradient, expected in zip(ours, exact, strict=True):
        assert relative(gradient, expected) < bound


@pytest.mark.parametrize("hidden", [96, 100])
def test_kernels_are_chosen_for_operands_that_they_cannot_read(hidden, monkeypatch):
    """TMA wants rows at multiples of 16 bytes: other widths take products by cuBLAS, and both are right."""
    chosen = []
    original = planner.choose_kernels
    monkeypatch.setattr(planner, "choose_kernels", lambda *a: chosen.append(original(*a)) or chosen[-1])
    inputs = head(150, hidden, 3000)
    s, dx, dw = gradients(*inputs)
    hopper = torch.cuda.get_device_capability()[0] == 9
    assert chosen == ["hopper" if hopper and hidden == 96 else "triton"]
    logprob, entropy, ex, ew = truth(*inputs)
    assert (s.logprob - logprob).abs().max() < 1e-4 and (s.entropy - entropy).abs().max() < 1e-4
    assert relative(dx, ex) < 6e-3 and relative(dw, ew) < 6e-3


@pytest.mark.parametrize("cache", [0, 1 << 30])
def test_compiled_call_is_wrong(cache):
    """CMP-02: fullgraph on CUDA, where the fakes describe the kernels' own blocks."""
    x, w, y, *_ = head(200, 64, 3000)
    y[::3] = -100

    def loss(x, w):
        return linear_cross_entropy(x, w, y, entropy_coef=0.1, options=ComputeOptions(cache_bytes=cache))

    results = [
        (value := f(x, w), *torch.autograd.grad(value, [x, w])) for f in (loss, torch.compile(loss, fullgraph=True))
    ]
    assert relative(results[1][0], results[0][0].double()) < 1e-6
    # Upstream gradients differ in their last bits, and so may a few roundings to bf16.
    for compiled, eager in zip(results[1][1:], results[0][1:], strict=True):
        assert relative(compiled, eager.double()) < 1e-4


def test_tf32_is_followed():
    """fp32 products are as torch is set: exact by default, TF32 when allowed."""
    inputs = head(64, 512, 3000, torch.float32)
    _, _, ex, _ = truth(*inputs)
    errors = []
    for precision in ("highest", "high"):
        torch.set_float32_matmul_precision(precision)
        errors.append(relative(gradients(*inputs)[1], ex))
    torch.set_float32_matmul_precision("highest")
    assert errors[0] < 1e-5 < errors[1] < 3e-3


def test_autocast_takes_fp32_parameters():
    x, w, y, a, b = head(64, 128, 3000, torch.float32)
    with torch.autocast(DEVICE, torch.bfloat16):
        _, dx, dw = gradients(x, w, y, a, b)
    assert dx.dtype == dw.dtype == torch.float32
    _, _, ex, ew = truth(x.bfloat16(), w.bfloat16(), y, a, b)
    assert relative(dx, ex) < 1e-2 and relative(dw, ew) < 1e-2


def test_runs_differ():
    """Bitwise: no atomics, the same order of sums in every run."""
    inputs = head(300, 256, 20000)
    first, second = (gradients(*inputs) for _ in range(2))
    assert torch.equal(first[0].entropy, second[0].entropy) and torch.equal(first[0].logprob, second[0].logprob)
    assert torch.equal(first[1], second[1]) and torch.equal(first[2], second[2])


def test_uninitialised_memory_is_read():
    """tests/conftest.py fills every uninitialised buffer with NaN."""
    assert torch.empty(3, device=DEVICE).isnan().all()
    s, dx, dw = gradients(*head(2100, 64, 9000), cache_bytes=0)
    assert all(t.isfinite().all() for t in (s.entropy, s.smooth_logprob, dx, dw))


def test_wide_chunks_overwrite_the_weight_gradient():
    """Chunks that work in the end of dw, at a size where there are many."""
    inputs = head(2048, 256, 70000)
    wide, narrow = gradients(*inputs, cache_bytes=0), gradients(*inputs, cache_bytes=0, chunk_bytes=2048 * 2048 * 4)
    assert relative(wide[1], narrow[1].double()) < 3e-3 and relative(wide[2], narrow[2].double()) < 3e-3
    exact = truth(*inputs)
    assert relative(wide[2], exact[3]) <= 1.1 * relative(narrow[2], exact[3])


@contextlib.contextmanager
def syncs_are_errors():
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_dense_call_syncs():
    """PERF-02"""
    x, w, y, _, _ = head(64, 64, 3000)
    options = ComputeOptions(skip_ignored=False, check_labels=False, cache_bytes=0)
    linear_cross_entropy(x, w, y, entropy_coef=0.1, options=options).backward()
    with syncs_are_errors():
        linear_cross_entropy(x, w, y, entropy_coef=0.1, options=options).backward()


@pytest.mark.parametrize("ignored", [0, 10, 64])
@pytest.mark.parametrize("call", ["head", "given logits"])
def test_more_than_one_sync(call, ignored, monkeypatch):
    """PERF-02: the wait for one event, which torch's debug mode does not see; that finds any other."""
    x, w, y, _, _ = head(64, 64, 3000)
    y[:ignored] = -100
    z = (x @ w.t()).detach().requires_grad_()
    run = {
        "head": lambda: linear_cross_entropy(x, w, y, entropy_coef=0.1).backward(),
        "given logits": lambda: cross_entropy(z, y, entropy_coef=0.1).backward(),
    }[call]
    run()
    waits, wait = [], torch.cuda.Event.synchronize
    monkeypatch.setattr(torch.cuda.Event, "synchronize", lambda event: waits.append(event) or wait(event))
    with syncs_are_errors():
        run()
    assert len(waits) == 1


def test_bad_label_is_found_late_or_not_at_all():
    x, w, y, _, _ = head(64, 64, 3000)
    y[5] = 3000
    with pytest.raises(ValueError, match="target: label 3000 at flat position 5"):
        linear_cross_entropy(x, w, y)


def test_graph_capture_fails():
    x, w, y, _, _ = head(64, 64, 3000)
    y[:10] = -100
    options = ComputeOptions(skip_ignored=False, check_labels=False, cache_bytes=0)
    x.grad, w.grad = torch.zeros_like(x), torch.zeros_like(w)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            linear_cross_entropy(x, w, y, entropy_coef=0.1, options=options).backward()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = linear_cross_entropy(x, w, y, entropy_coef=0.1, options=options)
        dx, dw = torch.autograd.grad(loss, [x, w])
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
    graph.replay()
    expected = linear_cross_entropy(x, w, y, entropy_coef=0.1, options=options)
    assert torch.equal(loss, expected)
    assert all(torch.equal(a, b) for a, b in zip((dx, dw), torch.autograd.grad(expected, [x, w]), strict=True))


def test_cache_that_cannot_be_allocated_raises(monkeypatch):
    """The budget promises more than there is: the call recomputes, with the same result."""
    inputs = head(4096, 128, 100000)
    expected = gradients(*inputs, cache_bytes=0)
    failed = []
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(min(1.0, (torch.cuda.memory_reserved() + (700 << 20)) / total))
    original = engine._cache
    monkeypatch.setattr(engine, "_cache", lambda p, size: failed.append(c := original(p, size)) or c)
    try:
        result = gradients(*inputs, cache_bytes=1 << 40)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert failed[0].shape[1] == 0
    assert torch.equal(result[1], expected[1]) and torch.equal(result[2], expected[2])


def test_automatic_cache_asks_for_more_than_is_free():
    x, w, y, *_ = head(1024, 128, 50000)
    free = torch.cuda.mem_get_info()[0]
    before = torch.cuda.memory_allocated()
    s = linear_token_statistics(x, w, y)
    assert 0 < torch.cuda.memory_allocated() - before <= free / 4 + (64 << 20)
    del s


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_given_logits_are_wrong(dtype):
    torch.manual_seed(0)
    z = (torch.randn(130, 5000, device=DEVICE) * 3).to(dtype).requires_grad_()
    y = torch.randint(0, 5000, (130,), device=DEVICE)
    (dz,) = torch.autograd.grad(cross_entropy(z, y, entropy_coef=0.3, label_smoothing=0.1, softcap=20.0), z)
    exact = z.detach().double().requires_grad_()
    log_p = (20 * torch.tanh(exact / 20)).log_softmax(-1)
    loss = F.nll_loss(log_p, y) * 0.9 - 0.1 * log_p.mean() + 0.3 * (log_p.exp() * log_p).sum(-1).mean()
    (dexact,) = torch.autograd.grad(loss, exact)
    assert relative(dz, dexact) < (3e-3 if dtype == torch.bfloat16 else 1e-5)


def test_offsets_wrap_in_weight_and_gradient():
    """SHP-11: 2.2e9 elements in the weight and in its gradient."""
    vocab, hidden = 262144, 8448
    x = torch.randn(64, hidden, device=DEVICE, dtype=torch.bfloat16).requires_grad_()
    w = (torch.randn(vocab, hidden, device=DEVICE, dtype=torch.bfloat16) * 0.01).requires_grad_()
    y = torch.full((64,), vocab - 1, device=DEVICE)
    s = linear_token_statistics(x, w, y)
    (dw,) = torch.autograd.grad(s.logprob.sum(), w)
    z = x.detach().double() @ w.detach()[-1000:].double().t()
    lse = torch.logsumexp((x.detach() @ w.detach().t()).double(), -1)
    assert ((z[:, -1] - lse) - s.logprob).abs().max() < 5e-3
    expected = (1 - s.logprob.exp().double()) @ x.detach().double()
    assert relative(dw[-1], expected) < 1e-2
    assert (dw[:10].abs().sum() > 0) and dw[-2].abs().sum() > 0


def test_offsets_wrap_in_the_logits():
    """SHP-11: one chunk of 2.6e9 fp32 logits."""
    x, w, y, a, b = head(20000, 64, 131072)
    options = dict(chunk_bytes=1 << 40, cache_bytes=0)
    s, dx, _ = gradients(x, w, y, a, b, **options)
    t, ex, _ = gradients(x, w, y, a, b, cache_bytes=0)
    assert torch.allclose(s.entropy, t.entropy, atol=1e-5) and torch.allclose(s.logprob, t.logprob, atol=1e-5)
    assert relative(dx[-5:], ex[-5:].double()) < 3e-3


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
def test_tensors_on_another_device_than_the_current_one():
    """VAL-04"""
    with torch.cuda.device(0):
        x = torch.randn(9, 8, device="cuda:1", requires_grad=True)
        w = torch.randn(300, 8, device="cuda:1")
        y = torch.arange(9, device="cuda:1")
        loss = linear_cross_entropy(x, w, y)
        assert torch.allclose(loss, F.cross_entropy(x @ w.t(), y), atol=1e-5)
