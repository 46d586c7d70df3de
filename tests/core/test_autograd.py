"""Gradients under every way of asking for them. Cases AG-01 to AG-15."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from problems import STATISTICS, all_losses, all_statistics, labels, plain_losses, problem, solve
from torch.utils.checkpoint import checkpoint

from liger_entropy import (
    ComputeOptions,
    cross_entropy,
    engine,
    gradients,
    linear_cross_entropy,
    linear_token_statistics,
)
from liger_entropy.products import Products

RECOMPUTE = ComputeOptions(cache_bytes=0)
CACHES = {"recompute": RECOMPUTE, "cache": ComputeOptions(cache_bytes=1 << 30)}


def assert_near(ours, exact, rtol=1e-10, atol=1e-12):
    torch.testing.assert_close(ours, exact, rtol=rtol, atol=atol)


def assert_all_near(ours, exact, **tolerances):
    for a, b in zip(ours, exact, strict=True):
        assert_near(a, b, **tolerances)


def leaves(tokens=8, hidden=10, vocab=15, dtype=torch.float64, **more):
    p = problem(tokens, hidden, vocab, dtype, names=("linear_bias",), **more).leaves()
    return p, (p.input, p.linear_weight, p.options["linear_bias"])


def logits(p):
    return p.input @ p.linear_weight.T + p.options["linear_bias"]


def losses(p, **more):
    """Library's and torch's loss on the same leaves."""
    ours = linear_cross_entropy(p.input, p.linear_weight, p.target, linear_bias=p.options["linear_bias"], **more)
    return ours, F.cross_entropy(logits(p), p.target, reduction=more.get("reduction", "mean"))


@pytest.mark.parametrize("compute", CACHES.values(), ids=CACHES)
@pytest.mark.parametrize("mask", ["mask", "negative", "advantage"])
def test_upstream_gradient_enters_after_the_sum_over_tokens(mask, compute):
    """AG-01, with the first label ignored."""
    p, tensors = leaves(ignored=0)
    p.target[0] = -100
    mask = dict(mask=torch.tensor([3, 0, 1, 0.5, 2, 0, 1, 4]), negative=-torch.rand(8), advantage=torch.randn(8))[mask]
    ours, exact = losses(p, reduction="none", options=compute)
    assert_all_near(*(torch.autograd.grad((mask * v).sum(), tensors) for v in (ours, exact)))


@pytest.mark.parametrize("scale", [0.0, -2.0, 0.25, 65536.0])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_gradient_is_not_linear_in_the_upstream_gradient(reduction, scale):
    """AG-02"""
    p, tensors = leaves()
    ours, exact = losses(p, reduction=reduction)
    right = [scale * g for g in torch.autograd.grad(exact, tensors)]
    assert_all_near(torch.autograd.grad(scale * ours, tensors), right, rtol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("compute", [RECOMPUTE, CACHES["cache"], ComputeOptions(skip_ignored=False)], ids=str)
def test_inputs_are_written_to(compute, dtype):
    """AG-03: equal and of the same version after forward, and after each of two backwards; the upstream too."""
    names = ("linear_bias", "weight", "token_weight", "temperature")
    p = problem(8, 5, 1100, dtype, names, label_smoothing=0.1, softcap=5.0, logit_scale=0.5, reduction="none").leaves()
    tensors = [p.input, p.linear_weight, p.target, *(p.options[n] for n in names)]
    before = [(t.detach().clone(), t._version) for t in tensors]
    out = all_losses(p, compute)
    upstream = torch.randn(8)
    upstreams = upstream.clone()
    for _ in range(2):
        torch.autograd.backward((out["loss"], out["entropy_loss"]), (upstream, upstream), retain_graph=True)
        for tensor, (value, version) in zip(tensors, before, strict=True):
            assert torch.equal(tensor, value) and tensor._version == version
        assert torch.equal(upstream, upstreams) and upstream._version == 0


def test_given_logits_are_written_to():
    """AG-03: Liger's kernel stores the gradient over them."""
    z, t = torch.randn(8, 1100, requires_grad=True), labels((8,), 1100)
    before = z.detach().clone()
    cross_entropy(z, t, softcap=5.0, entropy_coef=0.1, temperature=0.7, logit_scale=0.3).backward()
    assert torch.equal(z, before) and z._version == 0


def test_shared_hidden_state_gets_a_wrong_gradient():
    """AG-03: two losses on one activation."""
    p, _ = leaves()
    x = p.input.detach().requires_grad_()
    grads = []
    for fused in (True, False):
        h = torch.tanh(x)
        loss = (
            linear_cross_entropy(h, p.linear_weight, p.target)
            if fused
            else F.cross_entropy(h @ p.linear_weight.T, p.target)
        )
        grads.append(torch.autograd.grad(loss + h.square().sum() + h.sin().sum(), x)[0])
    assert_near(*grads)


@pytest.mark.parametrize("compute", CACHES.values(), ids=CACHES)
@pytest.mark.parametrize("share", [(1.0, 1.0), (0.0, 1.0), (1.0, 0.0), (-1.0, 0.3)])
def test_joint_gradient_of_loss_and_entropy_is_wrong(share, compute):
    """AG-05"""
    p, tensors = leaves()
    a, b = share[0] * torch.randn(8, dtype=torch.float64), share[1] * torch.randn(8, dtype=torch.float64)
    s = linear_token_statistics(
        p.input, p.linear_weight, p.target, linear_bias=p.options["linear_bias"], options=compute
    )
    log_p = logits(p).log_softmax(-1)
    kept = p.target != -100
    exact = a @ torch.where(kept, -log_p.gather(1, p.target.clamp(min=0)[:, None])[:, 0], 0)
    exact = exact + b @ torch.where(kept, -(log_p.exp() * log_p).sum(-1), 0)
    assert_all_near(torch.autograd.grad(-s.logprob @ a + s.entropy @ b, tensors), torch.autograd.grad(exact, tensors))


@pytest.mark.parametrize("wanted", [c for n in (1, 2, 3) for c in itertools.combinations(STATISTICS[:4], n)])
def test_absent_upstream_gradient_crashes_or_changes_the_others(wanted):
    """AG-06: only some of the statistics are used."""
    p, tensors = leaves(vocab=1100)
    some = sum(all_statistics(p)[name].sum() for name in wanted)
    every = sum(v.sum() * (n in wanted) for n, v in all_statistics(p).items() if n != "prediction")
    assert_all_near(*(torch.autograd.grad(v, tensors) for v in (some, every)))


def test_unused_statistics_cause_work(monkeypatch):
    """AG-06, MEM-02, PERF-03: a loss without entropy never asks for its gradient, nor for the statistic."""
    seen = []
    original = gradients.backward

    def spy(upstream, tensors, kept, settings, needs):
        seen.append((list(settings.wanted), [g is not None for g in upstream]))
        return original(upstream, tensors, kept, settings, needs)

    monkeypatch.setattr(gradients, "backward", spy)
    p, _ = leaves()
    losses(p)[0].backward()
    assert seen == [([False, False, False], [True, False, False, False])]


def test_no_upstream_gradient_at_all_runs_the_backward(monkeypatch):
    """AG-06"""
    monkeypatch.setattr(gradients, "backward", None)
    p, _ = leaves()
    s = all_statistics(p)
    (p.input.sum() + 0 * s["prediction"].sum()).backward()


def test_entropy_is_detached():
    """AG-07"""
    p, _ = leaves()
    out = all_losses(p)
    for value in (out["loss"], out["entropy_loss"], out["z_loss"]):
        assert value.requires_grad
    assert not out["predicted_tokens"].requires_grad and not out["token_accuracy"].requires_grad
    with torch.no_grad():
        assert not any(v.requires_grad for v in (*all_losses(p).values(), *all_statistics(p).values()))


@pytest.mark.parametrize("chunk_bytes", [1, 1 << 40])
def test_entropy_backward_meets_an_overwritten_tensor(chunk_bytes):
    """AG-08"""
    p, tensors = leaves(vocab=2500)
    options = ComputeOptions(chunk_bytes=chunk_bytes)
    out = linear_cross_entropy(
        p.input, p.linear_weight, p.target, linear_bias=tensors[2], return_entropy_loss=True, options=options
    )
    out.entropy_loss.backward()
    assert all(t.grad.isfinite().all() and (t.grad != 0).any() for t in tensors)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_mode_fails_or_keeps_tensors_for_a_backward(mode):
    """AG-09: the same values, nothing saved, no cache."""
    p, _ = leaves(vocab=1100)
    exact = all_losses(p)
    saved = []
    with mode(), torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        ours = all_losses(p)
        assert (
            linear_token_statistics(p.input, p.linear_weight, p.target, options=CACHES["cache"])
            .entropy.isfinite()
            .all()
        )
    assert not saved
    for name, value in ours.items():
        assert torch.equal(value, exact[name]), name


def test_inference_tensor_trains_a_weight_silently():
    """AG-09: torch's own error about inference tensors saved for backward."""
    w = torch.randn(11, 5, requires_grad=True)
    with torch.inference_mode():
        h = torch.randn(4, 5)
    with pytest.raises(RuntimeError, match=r"[Ii]nference tensors"):
        linear_cross_entropy(h, w, torch.tensor([1, 2, 3, 4])).backward()


def test_second_derivative_is_silently_wrong():
    """AG-11"""
    for function in (all_losses, all_statistics):
        p, tensors = leaves()
        total = sum(v.sum() for v in function(p).values() if v.requires_grad)
        g = torch.autograd.grad(total, tensors, create_graph=True)
        with pytest.raises(RuntimeError, match="second derivatives are not implemented"):
            g[0].square().sum().backward()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", ["loss", "entropy_loss", "z_loss"])
def test_in_place_scaling_of_the_loss_breaks_backward(name, reduction):
    """AG-12: Trainer multiplies the loss in place."""
    p, tensors = leaves(reduction=reduction, lse_square_scale=0.1)
    exact = torch.autograd.grad(4 * all_losses(p)[name].mean(), tensors)
    value = all_losses(p)[name]
    value *= 4
    assert_all_near(torch.autograd.grad(value.mean(), tensors), exact)


@pytest.mark.parametrize("name", STATISTICS[:4])
def test_in_place_scaling_of_a_statistic_breaks_backward(name):
    """AG-12"""
    p, tensors = leaves()
    exact = torch.autograd.grad(4 * all_statistics(p)[name].mean(), tensors)
    value = all_statistics(p)[name]
    value.mul_(4)
    assert_all_near(torch.autograd.grad(value.mean(), tensors), exact)


@pytest.mark.parametrize("skip_ignored", [True, False])
@pytest.mark.parametrize("kept", [[297, 298, 299], [0], [150], [0, 299]], ids=str)
def test_few_labels_among_many_ignored_get_no_gradient(kept, skip_ignored):
    """AG-13"""
    p, tensors = leaves(300, ignored=0)
    p.target[[i for i in range(300) if i not in kept]] = -100
    ours, exact = losses(p, options=ComputeOptions(skip_ignored=skip_ignored))
    grads = torch.autograd.grad(ours, tensors)
    assert_all_near(grads, torch.autograd.grad(exact, tensors))
    assert (grads[0] != 0).any(dim=1).nonzero().flatten().tolist() == kept


@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointed_loss_has_other_gradients(use_reentrant, autocast):
    """AG-14"""
    p, _ = leaves(dtype=torch.float32)
    tensors = (p.input, p.linear_weight)

    def loss(x):
        out = linear_cross_entropy(x, p.linear_weight, p.target, return_entropy_loss=True)
        return out.loss + out.entropy_loss

    with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
        plain = torch.autograd.grad(loss(p.input), tensors)
        checkpoint(loss, p.input, use_reentrant=use_reentrant).backward()
    assert_all_near((p.input.grad, p.linear_weight.grad), plain, rtol=0, atol=0)


@pytest.mark.parametrize("compute", CACHES.values(), ids=CACHES)
@pytest.mark.parametrize("trainable", [c for n in (1, 2) for c in itertools.combinations(range(3), n)], ids=str)
def test_frozen_tensor_breaks_the_gradients_of_the_others(trainable, compute):
    """AG-15: every subset of input, weight and bias, by requires_grad and by autograd.grad."""
    p, tensors = leaves(vocab=1100)
    ours, exact = losses(p, options=compute)
    chosen = [tensors[i] for i in trainable]
    exact = torch.autograd.grad(exact, chosen)
    assert_all_near(torch.autograd.grad(ours, chosen), exact)
    for i, tensor in enumerate(tensors):
        tensor.requires_grad_(i in trainable)
    assert_all_near(torch.autograd.grad(losses(p, options=compute)[0], chosen), exact)


@pytest.mark.parametrize("frozen, skipped", [(0, "add_input_gradient"), (1, "weight_gradient")])
def test_frozen_tensor_costs_a_product(frozen, skipped, monkeypatch):
    """AG-15, MEM-04: needs_input_grad decides, also when autograd.grad asks for less than requires grad."""
    counts = dict.fromkeys(("logits", "add_input_gradient", "weight_gradient"), 0)
    for name in counts:
        original = getattr(Products, name)

        def counting(self, *arguments, _name=name, _original=original, **named):
            counts[_name] += 1
            return _original(self, *arguments, **named)

        monkeypatch.setattr(Products, name, counting)
    p, tensors = leaves(vocab=2500)
    tensors[frozen].requires_grad_(False)
    losses(p, options=RECOMPUTE)[0].backward()
    assert counts.pop(skipped) == 0 and counts.pop("logits") == 6 and set(counts.values()) == {3}


@pytest.mark.parametrize("compute", CACHES.values(), ids=CACHES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_second_backward_on_a_retained_graph_differs(dtype, compute):
    """The cache and the residuals survive a backward unchanged."""
    p, tensors = leaves(vocab=1100, dtype=dtype)
    total = sum(v.sum() for v in all_losses(p, compute).values() if v.requires_grad)
    first, second = (torch.autograd.grad(total, tensors, retain_graph=True) for _ in range(2))
    assert_all_near(first, second, rtol=0, atol=0)


OPTIONS = {
    "defaults": {},
    "everything": dict(label_smoothing=0.1, lse_square_scale=0.1, softcap=3.0, logit_scale=0.5),
    "temperature": dict(temperature=0.7),
    "mean": dict(reduction="mean", entropy_coef=0.5),
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("compute", CACHES.values(), ids=CACHES)
def test_numerical_derivative_disagrees(options, compute):
    """gradcheck in fp64, of the loss and every statistic."""
    p, tensors = leaves(4, 3, 6, ignored=0.2)
    token_weight = torch.rand(4, dtype=torch.float64, requires_grad=True)

    def loss(x, w, b, tw):
        out = linear_cross_entropy(
            x, w, p.target, linear_bias=b, token_weight=tw, return_entropy_loss=True, options=compute, **options
        )
        return out.loss, out.entropy_loss

    def statistics(x, w, b):
        more = {n: v for n, v in options.items() if n in ("softcap", "logit_scale", "temperature")}
        s = linear_token_statistics(x, w, p.target, linear_bias=b, options=compute, **more)
        return s.logprob, s.entropy, s.lse, s.smooth_logprob

    assert torch.autograd.gradcheck(loss, (*tensors, token_weight))
    assert torch.autograd.gradcheck(statistics, tensors)
    z = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda z: cross_entropy(z, p.target, **dict(entropy_coef=0.5) | options), z)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scaled_loss_overflows_or_underflows(dtype):
    """GradScaler: a loss times 65536 in fp32, gradients of the size of fp16's maximum and below its smallest number."""
    p = problem(64, 8, 300, dtype)
    for scale in (2.0**16, 2.0**-12):
        ours = solve(lambda p, s=scale: dict(loss=s * all_losses(p)["loss"]), p)
        exact = solve(lambda p, s=scale: dict(loss=s * plain_losses(p)["loss"]), p, torch.float64)
        for name in ours.gradients:
            smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
            assert_near(ours.gradients[name].double(), exact.gradients[name], rtol=1e-2, atol=2 * smallest)


def test_operator_runs_forward_twice(monkeypatch):
    """One forward and one backward a call, whatever is asked for."""
    calls = []
    for module, name in ((engine, "Forward"), (gradients, "backward")):
        original = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, _o=original, _n=name: calls.append(_n) or _o(*a))
    p, tensors = leaves()
    torch.autograd.grad(sum(v.sum() for v in all_losses(p).values() if v.requires_grad), tensors)
    assert calls == ["Forward", "backward"]


TRANSFORMS = {
    "grad": lambda f, x: torch.func.grad(f)(x),
    "vjp": lambda f, x: torch.func.vjp(f, x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
    "vmap": lambda f, x: torch.func.vmap(f)(x[None]),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_functional_transform_gives_a_wrong_derivative(transform):
    x, w, y = torch.randn(3, 4), torch.randn(5, 4), torch.tensor([0, 1, 4])
    for call in (lambda t: linear_cross_entropy(t, w, y), lambda t: cross_entropy(t @ w.t(), y)):
        with pytest.raises(RuntimeError, match=r"torch\.func"):
            transform(call, x)


def test_forward_mode_gives_a_wrong_derivative():
    x, w, y = torch.randn(3, 4), torch.randn(5, 4), torch.tensor([0, 1, 4])
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward mode"):
        linear_cross_entropy(torch.autograd.forward_ad.make_dual(x, x), w, y)
