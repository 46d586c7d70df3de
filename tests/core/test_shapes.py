"""Shapes, strides and sizes. Cases SHP-02 to SHP-14."""

import itertools
import math
import re

import pytest
import torch
import torch.nn.functional as F
from problems import all_losses, all_statistics, check_losses, check_statistics, problem, solve

from liger_entropy import ComputeOptions, cross_entropy, linear_cross_entropy, linear_token_statistics


def assert_near(ours, exact, rtol=1e-6, atol=1e-7):
    torch.testing.assert_close(ours.double(), exact.double(), rtol=rtol, atol=atol)


INPUTS = {
    "every other column": lambda: torch.randn(12, 10)[:, ::2],
    "transposed": lambda: torch.randn(5, 12).t(),
    "sequence first": lambda: torch.randn(4, 3, 5).transpose(0, 1),
    "expanded": lambda: torch.randn(1, 5).expand(12, 5),
    "reversed rows": lambda: torch.randn(24, 5)[1::2],
}
WEIGHTS = {
    "transposed": lambda: torch.randn(5, 1100).t(),
    "every other row": lambda: torch.randn(2200, 5)[::2],
    "every other column": lambda: torch.randn(1100, 10)[:, 1::2],
    "expanded": lambda: torch.randn(1100, 1).expand(1100, 5),
}
TARGETS = {
    "every other": lambda: torch.randint(0, 1100, (24,))[::2],
    "expanded": lambda: torch.randint(0, 1100, (1,)).expand(12),
    "transposed": lambda: torch.randint(0, 1100, (4, 3)).t(),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "kind, layout", [(k, n) for k, d in dict(input=INPUTS, weight=WEIGHTS, target=TARGETS).items() for n in d]
)
def test_strides_are_not_honoured(kind, layout, dtype):
    """SHP-02: the result of contiguous copies, bit for bit in the values."""
    x = (INPUTS[layout]() if kind == "input" else torch.randn(12, 5)).to(dtype)
    w = (WEIGHTS[layout]() if kind == "weight" else torch.randn(1100, 5)).to(dtype)
    t = TARGETS[layout]() if kind == "target" else torch.randint(0, 1100, x.shape[:-1])
    x = x.unflatten(0, t.shape) if t.ndim == 2 and x.ndim == 2 else x
    bias, class_weight = torch.randn(2200)[::2], torch.rand(2200)[::2]
    options = dict(linear_bias=bias, weight=class_weight, label_smoothing=0.1, entropy_coef=0.1)
    copies = {n: v.contiguous() if isinstance(v, torch.Tensor) else v for n, v in options.items()}
    results = []
    for a, b, c, o in ((x, w, t, options), (x.contiguous(), w.contiguous(), t.contiguous(), copies)):
        a, b = a.detach().requires_grad_(), b.detach().requires_grad_()
        loss = linear_cross_entropy(a, b, c, **o)
        results.append((loss, *torch.autograd.grad(loss, (a, b))))
    for ours, exact in zip(*results, strict=True):
        assert_near(ours, exact, 1e-6 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("layout", ["transposed", "every other column", "rows apart"])
def test_strides_of_given_logits_are_not_honoured(layout):
    """SHP-02"""
    z = {
        "transposed": lambda: torch.randn(1100, 6).t(),
        "every other column": lambda: torch.randn(6, 2200)[:, ::2],
        "rows apart": lambda: torch.randn(12, 1100)[::2],
    }[layout]()
    t = torch.randint(0, 1100, (6,))
    results = []
    for a in (z, z.contiguous()):
        a = a.detach().requires_grad_()
        loss = cross_entropy(a, t, entropy_coef=0.1, label_smoothing=0.1)
        results.append((loss, torch.autograd.grad(loss, a)[0]))
    for ours, exact in zip(*results, strict=True):
        assert_near(ours, exact)


@pytest.mark.parametrize("backward", ["sum", "mean", "expanded", "strided"])
def test_strides_of_the_upstream_gradient_are_not_honoured(backward):
    """SHP-03"""
    p = problem(8, 5, 11, torch.float64).leaves()
    loss = linear_cross_entropy(p.input, p.linear_weight, p.target, reduction="none")
    exact = F.cross_entropy(p.input @ p.linear_weight.T, p.target, reduction="none")
    upstream = dict(
        sum=torch.ones(8), mean=torch.full((8,), 1 / 8), expanded=torch.ones(()).expand(8), strided=torch.randn(16)[::2]
    )[backward].double()
    ours, right = (torch.autograd.grad(v, (p.input, p.linear_weight), upstream) for v in (loss, exact))
    if backward in ("sum", "mean"):
        ours = torch.autograd.grad(
            getattr(
                linear_cross_entropy(p.input, p.linear_weight, p.target, reduction="none"),
                backward,
            )(),
            (p.input, p.linear_weight),
        )
    for a, b in zip(ours, right, strict=True):
        assert_near(a, b, 1e-12)


@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 3)])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_no_tokens_crash(reduction, shape):
    """SHP-04: values 0 in the target's shape, gradients zeros and not None."""
    x, w = torch.empty(*shape, 8, requires_grad=True), torch.randn(11, 8, requires_grad=True)
    b = torch.randn(11, requires_grad=True)
    t = torch.empty(shape, dtype=torch.long)
    more = {f"return_{n}": True for n in ("entropy_loss", "z_loss", "token_accuracy", "predicted_tokens")}
    out = linear_cross_entropy(x, w, t, linear_bias=b, reduction=reduction, entropy_coef=0.1, **more)
    expected = shape if reduction == "none" else ()
    for value in (out.loss, out.entropy_loss, out.z_loss, out.token_accuracy):
        assert value.shape == expected and (value == 0).all()
    assert out.predicted_tokens.shape == shape
    for tensor, grad in zip((x, w, b), torch.autograd.grad(out.loss.sum(), (x, w, b)), strict=True):
        assert grad.shape == tensor.shape and (grad == 0).all()
    z = torch.empty(*shape, 11, requires_grad=True)
    cross_entropy(z, t, reduction=reduction).sum().backward()
    assert z.grad.shape == z.shape


@pytest.mark.parametrize("skip_ignored", [True, False])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_all_labels_ignored_gives_nan_or_no_gradient(reduction, skip_ignored):
    """SHP-05, SHP-06: 0, connected, with zero gradients for every trainable tensor, the bias too (torch: NaN)."""
    p = problem(4, 5, 11, names=("linear_bias", "weight", "token_weight"), reduction=reduction, entropy_coef=0.2)
    p.target[:] = -100
    result = solve(lambda p: all_losses(p, ComputeOptions(skip_ignored=skip_ignored)), p)
    for name in ("loss", "z_loss", "entropy_loss", "token_accuracy"):
        assert (result.values[name] == 0).all(), name
    assert (result.values["predicted_tokens"] == -1).all()
    for name, gradient in result.gradients.items():
        assert gradient is not None and (gradient == 0).all(), name


@pytest.mark.parametrize("vocab", [1, 2, 5, 15])
@pytest.mark.parametrize("hidden", [1, 3, 10, 17])
def test_odd_sizes_fail(hidden, vocab):
    """SHP-07"""
    for tokens in (1, 2, 3, 17):
        check_losses(problem(tokens, hidden, vocab, label_smoothing=0.1, entropy_coef=0.1))


def test_one_class_is_not_certain():
    """SHP-07: loss 0, H 0, zero gradients, exactly."""
    p = problem(5, 4, 1, ignored=0).leaves()
    out = linear_cross_entropy(p.input, p.linear_weight, p.target, return_entropy_loss=True)
    assert out.loss == 0 and out.entropy_loss == 0
    for grad in torch.autograd.grad(out.loss + out.entropy_loss, (p.input, p.linear_weight)):
        assert (grad == 0).all()


def test_packed_layout_is_refused_or_broadcast():
    """SHP-08: as many tokens as labels is enough; another number is an error that names both shapes."""
    p = problem(12, 8, 11)
    flat = linear_cross_entropy(p.input, p.linear_weight, p.target, reduction="none")
    packed = linear_cross_entropy(p.input[None], p.linear_weight, p.target.view(3, 4), reduction="none")
    assert torch.equal(packed, flat.view(3, 4))
    for bad in ((11,), (1,), (12, 2), (12, 1, 2)):
        with pytest.raises(ValueError, match=re.escape(f"{(12, 8)}")) as error:
            linear_cross_entropy(p.input, p.linear_weight, torch.zeros(bad, dtype=torch.long))
        assert str(bad) in str(error.value)


@pytest.mark.parametrize("shape", [(), (7,), (2, 3), (2, 1, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unreduced_outputs_lose_the_label_shape(shape, dtype):
    """SHP-09"""
    x, w = torch.randn(*shape, 5).to(dtype), torch.randn(11, 5).to(dtype)
    t = torch.randint(0, 11, shape)
    if t.ndim:
        t.view(-1)[0] = -100
    more = {f"return_{n}": True for n in ("entropy_loss", "z_loss", "token_accuracy", "predicted_tokens")}
    for out in (
        linear_cross_entropy(x, w, t, reduction="none", **more),
        cross_entropy(x @ w.T, t, reduction="none", **more),
    ):
        for value in (out.loss, out.entropy_loss, out.z_loss, out.token_accuracy):
            assert value.shape == shape and value.dtype == torch.float32
            assert t.ndim == 0 or value.view(-1)[0] == 0
        assert out.predicted_tokens.shape == shape and out.predicted_tokens.dtype == torch.int64
    for value in vars(linear_token_statistics(x, w, t)).values():
        assert value.shape == shape


@pytest.mark.parametrize("vocab", [65535, 65536, 65537, 102400, 131072, 256000, 300001])
def test_vocabulary_above_65536_fails(vocab):
    """SHP-10: with a zero weight loss and entropy are ln V."""
    x, w = torch.randn(3, 4, requires_grad=True), torch.zeros(vocab, 4, requires_grad=True)
    t = torch.tensor([0, 65535 - 1, vocab - 1])
    out = linear_cross_entropy(x, w, t, return_entropy_loss=True)
    assert_near(out.loss, torch.tensor(math.log(vocab)), 1e-6)
    assert_near(out.entropy_loss, torch.tensor(math.log(vocab)), 1e-6)
    out.loss.backward()
    rows = (torch.full((3, vocab), 1 / vocab) - F.one_hot(t, vocab)) / 3
    assert_near(w.grad, rows.T @ x.detach(), 1e-5, 1e-9)


def test_offset_in_given_logits_is_32_bit(tmp_path):
    """SHP-11: rows 2^31 + 5 elements apart. The file behind them is sparse: only what is touched takes room."""
    stride, vocab = 2**31 + 5, 40
    flat = torch.from_file(str(tmp_path / "logits"), shared=True, size=stride + vocab, dtype=torch.bfloat16)
    far = flat.as_strided((2, vocab), (stride, 1))
    far.copy_(torch.randn(2, vocab))
    near = far.clone().requires_grad_()
    far = far.detach().requires_grad_()
    t = torch.tensor([3, vocab - 1])
    losses = [cross_entropy(z, t, entropy_coef=0.3) for z in (far, near)]
    assert torch.equal(*losses)
    assert torch.equal(*(torch.autograd.grad(loss, z)[0] for loss, z in zip(losses, (far, near), strict=True)))


def test_packed_sequences_train_across_their_boundary():
    """SHP-12: with -100 at each boundary the packed loss is the token-weighted mean of the sequences' losses."""
    ids = [torch.randint(0, 11, (n,)) for n in (3, 2)]
    hidden, w = [torch.randn(n, 5) for n in (3, 2)], torch.randn(11, 5)
    shifted = [torch.cat([i[1:], torch.tensor([-100])]) for i in ids]
    packed = linear_cross_entropy(torch.cat(hidden)[None], w, torch.cat(shifted)[None])
    single = [linear_cross_entropy(h[None], w, t[None], reduction="sum") for h, t in zip(hidden, shifted, strict=True)]
    assert_near(packed, (single[0] + single[1]) / 3)


def test_batched_input_is_chunked_along_another_axis():
    """SHP-13"""
    p = problem((2, 7), 5, 3000)
    options = ComputeOptions(chunk_bytes=1)
    batched, flat = (
        linear_token_statistics(x, p.linear_weight, t, options=options)
        for x, t in ((p.input, p.target), (p.input.view(14, 5), p.target.view(14)))
    )
    for name, value in vars(flat).items():
        assert torch.equal(getattr(batched, name), value.view(2, 7)), name


def test_token_temperature_is_broadcast_over_the_vocabulary():
    """SHP-14: T == V."""
    p = problem(5, 6, 5, torch.float64, names=("temperature",), ignored=0)
    check_statistics(p)
    check_losses(p)
    for skip, (rows, shape) in itertools.product((True, False), [(slice(None), (5, 1)), (slice(None), (1, 5))]):
        p.options["temperature"] = p.options["temperature"].view(shape)[rows]
        all_statistics(p, ComputeOptions(skip_ignored=skip))
        check_statistics(p, ComputeOptions(skip_ignored=skip))


def test_token_temperature_is_not_dropped_with_the_ignored_rows():
    """SHP-14: each kept row meets its own temperature, whatever stands before it."""
    p = problem(9, 6, 1500, torch.float64, names=("temperature",), ignored=0.5)
    for skip_ignored, cache in itertools.product((True, False), (0, 1 << 30)):
        check_losses(p, ComputeOptions(skip_ignored=skip_ignored, cache_bytes=cache))
