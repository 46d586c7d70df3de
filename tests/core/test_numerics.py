"""Numerical failures of fused losses: padding, shifts, cancellation, -inf, NaN, accumulation. Cases NUM-01 to 24."""

import math

import oracle
import pytest
import torch
import torch.nn.functional as F
from problems import all_losses, check_losses, check_statistics, plain_losses, problem, solve

from liger_entropy import ComputeOptions, cross_entropy, linear_cross_entropy, linear_token_statistics


def assert_near(ours, exact, rtol=1e-5, atol=1e-6):
    torch.testing.assert_close(ours.double(), exact.double(), rtol=rtol, atol=atol)


def small_vocabulary_problem():
    torch.manual_seed(0)
    h = torch.randn(6, 8)
    w = 0.05 * torch.randn(130, 8)
    return h, w, torch.randint(0, 130, (6,))


def test_padded_columns_enter_the_softmax():
    """NUM-01: with the next multiple of a tile as V the loss would be 5.528."""
    h, w, t = small_vocabulary_problem()
    statistics = linear_token_statistics(h, w, t)
    assert abs(float(-statistics.logprob.mean()) - 4.854556) < 1e-5
    assert abs(float(statistics.entropy.mean()) - 4.857882) < 1e-5


@pytest.mark.parametrize("vocab", [1, 2, 3, 7, 97, 127, 129, 130, 255, 257, 1000, 1023, 1024, 1025, 2047, 2049, 32001])
def test_ragged_vocabulary_breaks_the_bounds(vocab):
    """NUM-01: log-prob <= 0 and 0 <= H <= ln V at every size around a block's edge."""
    p = problem(4, 5, vocab, ignored=0)
    s = linear_token_statistics(p.input, p.linear_weight, p.target, linear_bias=torch.full((vocab,), -40.0))
    assert (s.logprob <= 0).all() and (s.entropy >= -1e-6).all() and (s.entropy <= math.log(vocab) + 1e-5).all()
    assert_near(s.entropy, oracle.entropy_of(p.input.double() @ p.linear_weight.double().T), 1e-5, 2e-5)


@pytest.mark.parametrize("shift", [-50.0, -200.0, -1e4, 40.0, 1e4])
def test_constant_added_to_all_logits_changes_the_result(shift):
    """NUM-02: a running maximum that starts at 0 gives -inf or NaN on rows of negative logits."""
    h, w, t = small_vocabulary_problem()
    h, w = h.double().requires_grad_(), w.double().requires_grad_()
    bias = torch.full((130,), shift, dtype=torch.float64)
    plain, shifted = (linear_token_statistics(h, w, t, linear_bias=b) for b in (None, bias))
    for name in ("logprob", "entropy", "smooth_logprob"):
        a, b = getattr(plain, name), getattr(shifted, name)
        assert_near(b, a, 1e-9, 1e-9)
        for ga, gb in zip(*(torch.autograd.grad(v.sum(), (h, w), retain_graph=True) for v in (a, b)), strict=True):
            assert_near(gb, ga, 1e-7, 1e-9)
    assert_near(shifted.lse - shift, plain.lse, 1e-9, 1e-9)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_logits_overflow_the_softmax(dtype):
    """NUM-06: the loss of an unlikely label is 60000, not inf."""
    h = torch.full((2, 4), 8.0, dtype=dtype)
    w = torch.tensor([30000.0, -30000.0, 96.0]).div(32).repeat(4, 1).T.to(dtype)
    s = linear_token_statistics(h, w, torch.tensor([0, 1]))
    exact = oracle.statistics(h.double() @ w.double().T, torch.tensor([0, 1]))
    assert s.logprob[1] < -59000
    assert_near(s.logprob, exact["logprob"])
    assert_near(s.entropy, exact["entropy"])


def test_entropy_cancels_at_large_offset():
    """NUM-07: lse - sum p z in fp32 gives -0.035 here; the entropy is 0.011346."""
    w = torch.full((1000, 1), 9986.0)
    w[0] = 10000.1
    entropy = linear_token_statistics(torch.ones(1, 1), w, torch.tensor([0])).entropy
    exact = oracle.entropy_of(w.double().T)
    assert abs(float(exact) - 0.011346) < 2e-4
    assert_near(entropy, exact, 0, 1e-6)
    assert entropy >= -1e-6


@pytest.mark.parametrize("softcap", [None, 1.0, 5.0, 30.0])
@pytest.mark.parametrize("logit_scale", [0.0625, 0.125, 1.0])
@pytest.mark.parametrize("temperature", [0.3, 0.5, 2.0, 10.0])
def test_transform_is_missing_from_loss_or_gradient(temperature, logit_scale, softcap):
    """NUM-09"""
    names = ("linear_bias",)
    check_losses(
        problem(5, 6, 11, torch.float64, names, temperature=temperature, logit_scale=logit_scale, softcap=softcap)
    )


@pytest.mark.parametrize("temperature", [0.5, 1.5])
def test_entropy_and_logprob_speak_of_different_logits(temperature):
    """NUM-10"""
    p = problem(5, 6, 11, ignored=0)
    s = linear_token_statistics(3 * p.input, p.linear_weight, p.target, temperature=temperature)
    probability = torch.softmax(3 * p.input.double() @ p.linear_weight.double().T / temperature, dim=-1)
    assert_near(s.logprob.exp(), probability.gather(1, p.target[:, None])[:, 0])
    assert_near(s.entropy, torch.special.entr(probability).sum(-1), 1e-5, 1e-5)


def test_transforms_in_another_order():
    """NUM-11: softcap then temperature gives 4.661016, temperature then softcap 3.318830; bias first."""
    torch.manual_seed(2)
    h, w = 3 * torch.randn(4, 8), torch.randn(5, 8)
    t = torch.tensor([0, 1, 4, 2])
    assert abs(float(linear_cross_entropy(h, w, t, softcap=5.0, temperature=0.5)) - 4.661016) < 1e-5
    bias = torch.randn(5)
    options = dict(softcap=5.0, temperature=0.5, logit_scale=0.7)
    ours = linear_cross_entropy(h, w, t, linear_bias=bias, **options)
    z = 5 * torch.tanh((h @ w.T + bias).double() * 0.7 / 5) / 0.5
    assert_near(ours, F.cross_entropy(z, t))


@pytest.mark.parametrize("vocab", [64, 65, 300, 1500])
def test_bias_is_added_more_than_once(vocab):
    """NUM-12"""
    p = problem(70, 16, vocab)
    bias = (5 * torch.randn(vocab)).requires_grad_()
    loss = linear_cross_entropy(p.input, p.linear_weight, p.target, linear_bias=bias)
    z = p.input.double() @ p.linear_weight.double().T + bias.detach().double()
    kept = p.target != -100
    probability = torch.softmax(z[kept], -1) - F.one_hot(p.target[kept], vocab)
    loss.backward()
    assert loss > 0
    assert_near(loss, F.cross_entropy(z, p.target))
    assert_near(bias.grad, probability.mean(dim=0), 1e-4, 1e-7)


@pytest.mark.parametrize("chunk_bytes", [1, 97 * 4 * 1024, 97 * 4 * 2048, 1 << 30])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("pattern", ["none ignored", "a block of rows", "all but the last"])
def test_result_depends_on_the_chunk_size(pattern, reduction, chunk_bytes):
    """NUM-19"""
    p = problem(97, 6, 4500, ignored=0, reduction=reduction, entropy_coef=0.1, label_smoothing=0.1)
    if pattern != "none ignored":
        p.target[slice(16, 32) if pattern == "a block of rows" else slice(0, 96)] = -100
    whole = solve(lambda p: all_losses(p, ComputeOptions(chunk_bytes=1 << 40)), p)
    parts = solve(lambda p: all_losses(p, ComputeOptions(chunk_bytes=chunk_bytes)), p)
    for name, value in (whole.values | whole.gradients).items():
        assert_near((parts.values | parts.gradients)[name], value, 1e-5, 1e-6)


@pytest.mark.parametrize("chunk_bytes", [1, "auto", 1 << 40])
def test_weight_gradient_accumulates_in_half_precision(chunk_bytes):
    """NUM-20: bf16 accumulation over chunks errs by 0.0167, one rounding by 0.0018."""
    torch.manual_seed(0)
    h, w = torch.randn(8192, 32).bfloat16(), (0.1 * torch.randn(64, 32)).bfloat16().requires_grad_()
    t = torch.randint(0, 64, (8192,))
    linear_cross_entropy(h, w, t, reduction="sum", options=ComputeOptions(chunk_bytes=chunk_bytes)).backward()
    exact = w.detach().double().requires_grad_()
    F.cross_entropy(h.double() @ exact.T, t, reduction="sum").backward()
    assert (w.grad - exact.grad).norm() / exact.grad.norm() < 0.0025


def test_input_gradient_error_grows_with_the_number_of_chunks():
    """NUM-20, for the sum over the vocabulary."""
    p = problem(8, 16, 20000, torch.bfloat16, ignored=0, reduction="sum")
    exact = solve(plain_losses, p, torch.float64).gradients["input"]
    for chunk_bytes in (1, 1 << 40):
        ours = solve(lambda p, c=chunk_bytes: all_losses(p, ComputeOptions(chunk_bytes=c)), p).gradients["input"]
        assert (ours - exact).norm() / exact.norm() < 0.003


def test_small_probabilities_are_filtered_out_of_the_gradient():
    """NUM-21: every p is under 2.44e-4, and every row of dw is non-zero."""
    torch.manual_seed(0)
    h, w = torch.randn(8, 4), (0.01 * torch.randn(8192, 4)).requires_grad_()
    t = torch.randint(0, 8192, (8,))
    linear_cross_entropy(h, w, t).backward()
    exact = w.detach().double().requires_grad_()
    F.cross_entropy(h.double() @ exact.T, t).backward()
    other = torch.ones(8192, dtype=torch.bool).index_fill(0, t, False)
    assert (exact.grad[other].norm(dim=1) > 0).all()
    error = (w.grad - exact.grad).norm(dim=1) / exact.grad.norm(dim=1)
    assert error[other].max() < 1e-3


def test_minus_inf_logit_makes_nan():
    """NUM-22: a masked class has probability 0. With smoothing the loss is inf, as in torch."""
    bias = torch.tensor([1.0, 2.0, -math.inf])
    h, w = torch.zeros(1, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    t = torch.tensor([0])
    s = linear_token_statistics(h, w, t, linear_bias=bias)
    assert abs(-s.logprob.item() - 1.3132616) < 1e-6
    assert_near(s.entropy, oracle.entropy_of(torch.tensor([[1.0, 2.0]]).double()))
    for value in (s.logprob, s.entropy, s.lse):
        grads = torch.autograd.grad(value.sum(), (h, w), retain_graph=True)
        assert all(g.isfinite().all() for g in grads)
    assert linear_cross_entropy(h, w, t, linear_bias=bias, label_smoothing=0.1) == math.inf


@pytest.mark.parametrize("masked", ["a few", "the first 1024 columns", "all but one", "all but the label's column"])
def test_masked_classes_poison_loss_entropy_or_gradient(masked):
    """NUM-22 on given logits: equal to the problem without the masked classes, gradient 0 at them."""
    z = torch.randn(3, 2100, dtype=torch.float64)
    t = torch.tensor([2050, 1500, 2050])
    columns = {
        "a few": torch.arange(0, 2000, 7),
        "the first 1024 columns": torch.arange(1024),
        "all but one": torch.tensor([c for c in range(2100) if c not in (1500, 2050)]),
        "all but the label's column": torch.tensor([c for c in range(2100) if c != 2050]),
    }[masked]
    rows = slice(0, 3) if masked != "all but the label's column" else slice(0, 1)
    z, t = z[rows].index_fill(1, columns, -math.inf).requires_grad_(), t[rows]
    ours = cross_entropy(z, t, entropy_coef=0.3, lse_square_scale=1e-3)
    free = torch.ones(2100, dtype=torch.bool).index_fill(0, columns, False)
    inner = z.detach()[:, free].requires_grad_()
    labels = free.long().cumsum(0)[t] - 1
    exact = oracle.loss_terms(inner, labels, entropy_coef=0.3, lse_square_scale=1e-3)["loss"]
    ours.backward()
    exact.backward()
    assert_near(ours, exact, 1e-10)
    assert_near(z.grad[:, free], inner.grad, 1e-9, 1e-10)
    assert (z.grad[:, columns] == 0).all()


@pytest.mark.parametrize("skip_ignored", [True, False])
def test_nan_row_poisons_another_row_or_is_hidden(skip_ignored):
    """NUM-23: rows 2 (NaN) and 4 (every logit -inf) are NaN, forward and backward, and no other row is."""
    options = ComputeOptions(skip_ignored=skip_ignored)
    z = torch.randn(6, 1100, dtype=torch.float64)
    z[2, 3], z[4] = math.nan, -math.inf
    t = torch.tensor([1, -100, 2, 3, 4, 1099])
    z.requires_grad_()
    out = cross_entropy(z, t, reduction="none", return_entropy_loss=True, options=options)
    healthy = torch.tensor([0, 1, 3, 5])
    for value in (out.loss, out.entropy_loss):
        assert value[[2, 4]].isnan().all() and value[healthy].isfinite().all()
    (out.loss + out.entropy_loss).sum().backward()
    assert z.grad[2].isnan().any() and z.grad[healthy].isfinite().all()
    assert cross_entropy(z, t, options=options).isnan()


@pytest.mark.parametrize("skip_ignored", [True, False])
def test_nan_hidden_state_poisons_another_row(skip_ignored):
    """NUM-23 through the product."""
    p = problem(6, 4, 50, ignored=0)
    p.input[2] = math.nan
    s = linear_token_statistics(p.input, p.linear_weight, p.target, options=ComputeOptions(skip_ignored=skip_ignored))
    for value in (s.logprob, s.entropy, s.lse, s.smooth_logprob):
        assert value[2].isnan() and value[[0, 1, 3, 4, 5]].isfinite().all()


@pytest.mark.parametrize("skip_ignored", [True, False])
def test_nan_hidden_state_of_an_ignored_token_poisons_the_loss(skip_ignored):
    """NUM-13, NUM-23: padding may hold anything."""
    p = problem(6, 4, 50, ignored=0)
    p.target[2], p.input[2] = -100, math.nan
    p.input.requires_grad_()
    p.linear_weight.requires_grad_()
    options = ComputeOptions(skip_ignored=skip_ignored)
    out = linear_cross_entropy(
        p.input, p.linear_weight, p.target, entropy_coef=1.0, lse_square_scale=1.0, label_smoothing=0.1, options=options
    )
    out.backward()
    assert out.isfinite() and (p.input.grad[2] == 0).all() and p.input.grad.isfinite().all()
    if skip_ignored:  # without dropping, 0 * NaN of the product enters dw, as in torch
        assert p.linear_weight.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mean_of_many_tokens_drifts(dtype):
    """NUM-24"""
    p = problem(200_000, 2, 3, dtype, ignored=0)
    none, mean, total = (
        linear_cross_entropy(p.input, p.linear_weight, p.target, reduction=r) for r in ("none", "mean", "sum")
    )
    exact = none.double().mean()
    assert_near(mean, exact, 1e-6, 0)
    assert_near(total / 200_000, exact, 1e-6, 0)


@pytest.mark.parametrize("gap", [20.0, 60.0, 200.0, 3000.0])
def test_near_deterministic_rows_lose_their_entropy_or_gradient(gap):
    """NUM-07: from nearly one class to exactly one."""
    p = problem(4, 3, 40, torch.float32, ignored=0)
    p.linear_weight[7] = 0
    p.options["linear_bias"] = torch.zeros(40).index_fill(0, torch.tensor([7]), gap)
    check_statistics(p)


@pytest.mark.parametrize("scale", [0.0, 1e-30])
def test_square_of_a_large_lse_overflows_before_it_is_scaled(scale):
    output = cross_entropy(torch.full((2, 3), 1e20), torch.tensor([0, 1]), lse_square_scale=scale, return_z_loss=True)
    assert output.z_loss.item() == pytest.approx(1e40 * scale) and output.loss.isfinite()
