"""The torch.library registration: schemas, fakes, autograd, and torch.compile of a loss. Cases CMP-02, CMP-03."""

import contextlib

import pytest
import torch
import torch._dynamo
from problems import all_losses, all_statistics, given, labels, problem
from torch._dynamo.testing import CompileCounterWithBackend
from torch.testing._internal.two_tensor import TwoTensor

import liger_entropy
from liger_entropy import ComputeOptions, cross_entropy, gradients, linear_cross_entropy, linear_token_statistics, ops
from liger_entropy import labels as label_reading

EVERYTHING = ("linear_bias", "weight", "token_weight", "temperature")


def plain(argument):
    """Detached; an empty tensor with ordinary strides, since opcheck's own copy fails on others."""
    if not isinstance(argument, torch.Tensor):
        return argument
    return argument.detach() if argument.numel() else argument.new_empty(argument.shape)


@pytest.fixture
def recorded(monkeypatch):
    """Arguments of every call of the three operators."""
    calls = {name: [] for name in ("token_statistics", "token_statistics_backward", "inspect_rows")}
    original = ops.token_statistics
    monkeypatch.setattr(
        ops, "token_statistics", lambda *a, **k: calls["token_statistics"].append(a) or original(*a, **k)
    )
    inspection = label_reading.Inspection
    monkeypatch.setattr(label_reading, "Inspection", lambda *a: calls["inspect_rows"].append(a) or inspection(*a))
    backward = gradients.backward

    def record(*parts):
        calls["token_statistics_backward"].append(tuple(plain(a) for part in parts for a in part))
        return backward(*parts)

    monkeypatch.setattr(gradients, "backward", record)
    return calls


SAMPLES = {
    # name: (function, problem, compute options)
    "plain": (all_losses, lambda: problem((2, 4), 5, 11, ignored=0), {}),
    "every option": (
        all_losses,
        lambda: problem(8, 5, 1100, names=EVERYTHING, label_smoothing=0.1, softcap=3.0, lse_square_scale=0.1),
        {},
    ),
    "partial cache": (all_losses, lambda: problem(8, 5, 2500), dict(cache_bytes=8 * 4 * 1024)),
    "full cache": (all_losses, lambda: problem(8, 5, 1100, torch.float16), dict(cache_bytes=1 << 30)),
    "statistics": (all_statistics, lambda: problem(8, 5, 1100, names=("weight",)), {}),
    "no tokens": (all_losses, lambda: problem(0, 5, 11), {}),
    "given logits": (all_losses, lambda: given(problem(8, 5, 1100, torch.bfloat16, softcap=3.0)), {}),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_operator_breaks_its_schema_fake_or_autograd(name, recorded):
    """torch.library.opcheck of all three operators, on the arguments of real calls."""
    function, make, compute = SAMPLES[name]
    p = make().leaves()
    if name == "full cache":
        p.linear_weight.requires_grad_(False)
    values = function(p, ComputeOptions(**compute))
    sum(v.sum() for v in values.values() if v.requires_grad).backward()
    assert all(len(calls) == 1 for calls in recorded.values())
    for op, calls in recorded.items():
        torch.library.opcheck(getattr(torch.ops.liger_entropy, op).default, calls[0])


def compiled_and_eager(function, arguments, backend):
    torch._dynamo.reset()
    results = []
    for f in (function, torch.compile(function, backend=backend, fullgraph=True)):
        leaves = [a.detach().requires_grad_(a.is_floating_point()) for a in arguments]
        out = f(*leaves)
        total = sum(v.sum() for v in (out if isinstance(out, tuple) else (out,)))
        results.append((out, torch.autograd.grad(total, [a for a in leaves if a.requires_grad])))
    return results


MODULE = liger_entropy.LigerFusedLinearCrossEntropyLoss(label_smoothing=0.1, return_entropy_loss=True, entropy_coef=0.1)


def module_loss(x, w, t):
    out = MODULE(w, x, t)
    return out.loss, out.entropy_loss


def statistics(x, w, t):
    s = linear_token_statistics(x, w, t, temperature=0.7, softcap=5.0)
    return s.logprob, s.entropy, s.lse, s.smooth_logprob


def all_options(x, w, t):
    vocab, tokens = w.shape[0], t.numel()
    out = linear_cross_entropy(
        x, w, t, linear_bias=w[:, 0], weight=torch.linspace(0.5, 1, vocab), reduction="none", label_smoothing=0.1,
        token_weight=torch.linspace(0.1, 1, tokens), lse_square_scale=0.01, entropy_coef=0.1, softcap=5.0,
        logit_scale=0.5, temperature=torch.linspace(0.5, 1.5, tokens), return_entropy_loss=True,
        return_token_accuracy=True, return_predicted_tokens=True,
    )  # fmt: skip
    return out.loss, out.entropy_loss


FUNCTIONS = {
    "loss": linear_cross_entropy,
    "given logits": lambda x, w, t: cross_entropy(x @ w.T, t, entropy_coef=0.1),
    "module": module_loss,
    "statistics": statistics,
    "all options": all_options,
    "nothing dropped": lambda x, w, t: linear_cross_entropy(x, w, t, options=ComputeOptions(skip_ignored=False)),
    "with a cache": lambda x, w, t: linear_cross_entropy(x, w, t, options=ComputeOptions(cache_bytes=1 << 30)),
}


@pytest.mark.parametrize("name, backend", [*((n, "aot_eager") for n in FUNCTIONS), ("loss", "eager")])
def test_compiled_loss_breaks_the_graph_or_differs(name, backend):
    """CMP-02: fullgraph, with ignored labels."""
    x, w, t = torch.randn(6, 5), torch.randn(1100, 5), labels((6,), 1100)
    torch.testing.assert_close(*compiled_and_eager(FUNCTIONS[name], (x, w, t), backend))


def test_inductor_breaks_the_loss():
    """CMP-02"""
    x, w, t = torch.randn(6, 5), torch.randn(40, 5), labels((6,), 40)
    torch.testing.assert_close(*compiled_and_eager(all_options, (x, w, t), "inductor"))


@pytest.mark.parametrize(
    "call",
    [
        lambda x, w, t: linear_cross_entropy(x.t(), w, t, entropy_coef=0.1),
        lambda x, w, t: cross_entropy((w @ x).t(), t, entropy_coef=0.1),
    ],
)
def test_inductor_expects_other_strides_of_a_transposed_input(call):
    x, w, t = torch.randn(5, 6), torch.randn(40, 5), labels((6,), 40)
    torch.testing.assert_close(*compiled_and_eager(call, (x, w, t), "inductor"))


def test_dynamic_numbers_break_the_graph():
    """torch.compile(dynamic=True) makes symbols of float arguments."""

    def loss(x, w, t, c):
        return linear_cross_entropy(x, w, t, entropy_coef=c, softcap=5 * c, temperature=c, logit_scale=c)

    torch._dynamo.reset()
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True, dynamic=True)
    x, w, t = torch.randn(6, 5, requires_grad=True), torch.randn(40, 5), labels((6,), 40)
    for c in (0.5, 0.75, 1.5):
        torch.testing.assert_close(compiled(x, w, t, c), loss(x, w, t, c))


def test_meta_tensors_are_computed_on():
    logits, target = torch.empty(4, 9, device="meta"), torch.empty(4, dtype=torch.int64, device="meta")
    assert cross_entropy(logits, target, entropy_coef=0.1).shape == ()
    hidden = torch.empty(4, 9, device="meta", requires_grad=True)
    loss = linear_cross_entropy(hidden, torch.empty(7, 9, device="meta"), target, entropy_coef=0.1)
    loss.backward()
    assert loss.is_meta and hidden.grad is not None and hidden.grad.shape == (4, 9)


def test_default_device_is_taken_for_that_of_the_tensors():
    x, w, t = torch.randn(4, 5), torch.randn(7, 5), torch.tensor([0, -100, 2, 3])
    expected = linear_cross_entropy(x, w, t)
    with torch.device("meta"):
        assert torch.equal(linear_cross_entropy(x, w, t), expected)


def test_part_of_a_wrapped_weight_is_taken_for_all_of_it():
    """Its values are its own: an op that it does not know must not read its storage."""
    x, w, t = torch.randn(4, 5), torch.randn(7, 5), torch.tensor([0, 1, 2, 3])
    with contextlib.suppress(RuntimeError, NotImplementedError, TypeError):
        loss = linear_cross_entropy(x, TwoTensor(w, 2 * w), t)
        assert isinstance(loss, TwoTensor)
        assert torch.equal(loss.a, linear_cross_entropy(x, w, t))
        assert torch.equal(loss.b, linear_cross_entropy(x, 2 * w, t))


def test_number_of_kept_tokens_recompiles():
    """CMP-03: none per count of kept tokens, at most one per length (the second length makes it dynamic)."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    loss = torch.compile(
        lambda x, w, t: linear_cross_entropy(x, w, t, entropy_coef=0.1), backend=counter, fullgraph=True
    )
    w = torch.randn(40, 5, requires_grad=True)
    for tokens in [*[30] * 5, *range(30, 50)]:
        x, t = torch.randn(tokens, 5, requires_grad=True), labels((tokens,), 40, ignored=torch.rand(()).item())
        value = loss(x, w, t)
        torch.testing.assert_close(value, linear_cross_entropy(x, w, t, entropy_coef=0.1))
        value.backward()
        assert counter.frame_count <= (1 if tokens == 30 else 2)


def test_compiled_loss_hides_a_bad_label():
    """The label check is inside the operator, so it survives compilation."""
    torch._dynamo.reset()
    loss = torch.compile(linear_cross_entropy, backend="aot_eager", fullgraph=True)
    x, w = torch.randn(3, 5), torch.randn(7, 5)
    with pytest.raises(ValueError, match="label 7 at flat position 1"):
        loss(x, w, torch.tensor([0, 7, 1]))


def test_compiled_loss_with_every_label_ignored_is_nan():
    torch._dynamo.reset()
    loss = torch.compile(linear_cross_entropy, backend="aot_eager", fullgraph=True)
    x, w = torch.randn(3, 5, requires_grad=True), torch.randn(7, 5, requires_grad=True)
    value = loss(x, w, torch.full((3,), -100))
    value.backward()
    assert value == 0 and (x.grad == 0).all() and (w.grad == 0).all()


def test_compiled_loss_under_autocast_differs():
    x, w, t = torch.randn(6, 5), torch.randn(40, 5), labels((6,), 40)

    def loss(x, w, t):
        with torch.autocast("cpu", torch.bfloat16):
            return linear_cross_entropy(x, w, t)

    torch.testing.assert_close(*compiled_and_eager(loss, (x, w, t), "aot_eager"))


def test_compiled_call_without_ignored_labels_reads_an_unfilled_order():
    """No label is ignored, then some, then all, in one compiled function: the order of rows exists only for some."""
    torch._dynamo.reset()
    w = torch.randn(50, 8, requires_grad=True)
    x = torch.randn(6, 8, requires_grad=True)

    def loss(x, w, y):
        return linear_cross_entropy(x, w, y, entropy_coef=0.1)

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for y in (torch.arange(6), torch.tensor([1, -100, 3, -100, 5, 6]), torch.full((6,), -100)):
        for got, expected in zip(*(torch.autograd.grad(f(x, w, y), [x, w]) for f in (compiled, loss)), strict=True):
            torch.testing.assert_close(got, expected)
