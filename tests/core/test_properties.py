"""What must hold for any problem: bounds, and invariance to how and in which order it is computed."""

import functools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from problems import all_losses, all_statistics, problem, solve

from liger_entropy import ComputeOptions, linear_cross_entropy, linear_token_statistics

NAMES = ("linear_bias", "weight", "token_weight", "temperature")
COMPUTE = st.builds(
    ComputeOptions,
    backend=st.just("torch"),
    chunk_bytes=st.sampled_from(["auto", 1, 50_000, 1 << 40]),
    cache_bytes=st.sampled_from(["auto", 0, 30_000, 60_000, 1 << 40]),
    skip_ignored=st.booleans(),
)


@st.composite
def problems(draw, dtype=torch.float64, largest=2600):
    """Any options together, vocabularies of one to three blocks."""
    names = [n for n in NAMES if draw(st.booleans())]
    options = dict(
        reduction=draw(st.sampled_from(["mean", "sum", "none"])),
        label_smoothing=draw(st.sampled_from([0.0, 0.1, 1.0])),
        softcap=draw(st.sampled_from([None, 4.0])),
        logit_scale=draw(st.sampled_from([1.0, 0.3])),
        lse_square_scale=draw(st.sampled_from([0.0, 0.1])),
        entropy_coef=draw(st.sampled_from([0.0, 0.5])),
    )
    tokens, vocab = draw(st.integers(1, 9)), draw(st.integers(1, 12) | st.integers(1000, largest))
    seed, ignored = draw(st.integers(0, 99)), draw(st.sampled_from([0.0, 0.5, 0.9]))
    return problem(tokens, draw(st.integers(1, 6)), vocab, dtype, names, seed, ignored, **options)


def assert_same(ours, exact, tolerance=1e-10):
    for name, value in (exact.values | exact.gradients).items():
        other = (ours.values | ours.gradients)[name]
        torch.testing.assert_close(other, value, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


@given(problems(torch.float32), st.sampled_from([0.0, 0.1, 1.0, 30.0]))
def test_statistics_leave_their_bounds(p, scale):
    """0 <= H <= ln V and logprob <= 0, from uniform rows to certain ones."""
    transform = {n: p.options[n] for n in ("softcap", "logit_scale")}
    s = linear_token_statistics(scale * p.input, p.linear_weight, p.target, **transform)
    assert (s.logprob <= 0).all()
    assert (s.entropy >= -1e-6).all() and (s.entropy <= math.log(p.vocab) + 1e-5).all()


@given(problems(), st.floats(-1e3, 1e3))
def test_constant_added_to_the_logits_matters(p, shift):
    options = dict(temperature=0.7, class_weight=p.options.get("weight"))
    s, shifted = (
        linear_token_statistics(p.input, p.linear_weight, p.target, linear_bias=torch.full((p.vocab,), c), **options)
        for c in (0.0, shift)
    )
    for name in ("logprob", "entropy", "smooth_logprob"):
        torch.testing.assert_close(getattr(s, name), getattr(shifted, name), rtol=1e-9, atol=1e-9)


@given(problems(), COMPUTE)
def test_way_of_computing_changes_the_loss(p, compute):
    """Chunks, no, part of or all of the logits cached, and dropping of ignored rows."""
    plain = ComputeOptions(chunk_bytes=1 << 40, cache_bytes=0, skip_ignored=False)
    assert_same(*(solve(functools.partial(all_losses, compute=c), p) for c in (compute, plain)))


@given(problems(), COMPUTE)
def test_way_of_computing_changes_a_statistic(p, compute):
    for name in ("token_weight", "reduction", "label_smoothing", "lse_square_scale", "entropy_coef"):
        p.options.pop(name, None)
    plain = ComputeOptions(chunk_bytes=1 << 40, cache_bytes=0, skip_ignored=False)
    assert_same(*(solve(functools.partial(all_statistics, compute=c), p) for c in (compute, plain)))


@given(problems(), COMPUTE)
def test_removing_ignored_rows_changes_the_loss(p, compute):
    kept = p.target != -100
    p.options["reduction"] = "sum" if p.options["reduction"] == "none" else p.options["reduction"]
    full, less = p.leaves(), p.leaves()
    less.target = less.target[kept]
    options = {n: v[kept] if n in ("token_weight", "temperature") else v for n, v in less.options.items()}
    ours = linear_cross_entropy(full.input, full.linear_weight, full.target, **full.options, options=compute)
    exact = linear_cross_entropy(less.input[kept], less.linear_weight, less.target, **options)
    torch.testing.assert_close(ours, exact, rtol=1e-10, atol=1e-10)
    for a, b in zip(
        torch.autograd.grad(ours, (full.input, full.linear_weight)),
        torch.autograd.grad(exact, (less.input, less.linear_weight)),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@given(problems(), st.randoms(use_true_random=False))
def test_order_of_tokens_matters(p, random):
    order = list(range(len(p.target)))
    random.shuffle(order)
    p.options["reduction"] = "none"
    values = all_losses(p)
    p.target, p.input = p.target[order], p.input[order]
    p.options |= {n: p.options[n][order] for n in ("token_weight", "temperature") if n in p.options}
    for name, value in all_losses(p).items():
        torch.testing.assert_close(value, values[name][order], rtol=1e-10, atol=1e-10)


@given(problems())
def test_order_of_classes_matters(p):
    order = torch.randperm(p.vocab)
    exact = all_losses(p)
    place = torch.empty_like(order)
    place[order] = torch.arange(p.vocab)
    p.linear_weight = p.linear_weight[order]
    p.options |= {n: p.options[n][order] for n in ("linear_bias", "weight") if n in p.options}
    p.target = torch.where(p.target == -100, -100, place[p.target.clamp(min=0)])
    for name in ("loss", "entropy_loss", "z_loss", "token_accuracy"):
        torch.testing.assert_close(all_losses(p)[name], exact[name], rtol=1e-9, atol=1e-9)


@given(problems(torch.bfloat16), COMPUTE)
def test_way_of_computing_changes_a_half_precision_loss(p, compute):
    """The statistics to fp32 rounding; the gradients to two roundings, of the cached logits and of the result."""
    plain = ComputeOptions(chunk_bytes=1 << 40, cache_bytes=0, skip_ignored=False)
    ours, exact = (solve(functools.partial(all_losses, compute=c), p) for c in (compute, plain))
    for name, value in exact.values.items():
        torch.testing.assert_close(ours.values[name], value, rtol=1e-5, atol=1e-4)
    for name, value in exact.gradients.items():
        scale = value.abs().max().item()
        torch.testing.assert_close(ours.gradients[name], value, rtol=0.02, atol=0.01 * scale + 1e-6)


@pytest.mark.parametrize("ties", [[0, 1], [5, 1030], [1023, 1024], [7, 8, 2047, 2499]])
def test_prediction_is_not_the_first_of_equals(ties):
    """As torch.argmax, within a block and across blocks."""
    w = torch.zeros(2500, 2)
    w[ties] = 3.0
    s = linear_token_statistics(torch.ones(1, 2), w, torch.tensor([0]))
    assert s.prediction.item() == ties[0]
