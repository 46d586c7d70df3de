"""Every bad argument is refused by name before anything is computed; what is allowed is not. Cases VAL-02 to VAL-06."""

import math
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from problems import problem

import liger_entropy
from liger_entropy import ComputeOptions, cross_entropy, engine, linear_cross_entropy, linear_token_statistics

X, W, T = torch.randn(4, 5), torch.randn(7, 5), torch.tensor([0, 1, 2, 3])
STATISTICS_CASES = {
    # name: (argument named, error, replaced arguments)
    "input is a list": ("input", TypeError, dict(input=[[1.0]])),
    "input without features": ("input: expected shape", ValueError, dict(input=X[:, :0], linear_weight=W[:, :0])),
    "input without dimensions": ("input: expected shape", ValueError, dict(input=X[0, 0], target=T[0])),
    "weight is None": ("linear_weight.*None", TypeError, dict(linear_weight=None)),
    "options is a dict": ("options.*dict", TypeError, dict(options={})),
    "input of integers": ("input", TypeError, dict(input=torch.ones(4, 5, dtype=torch.long))),
    "input complex": ("input", TypeError, dict(input=X.to(torch.complex64))),
    "weight of another dtype": ("linear_weight", TypeError, dict(linear_weight=W.bfloat16())),
    "weight of another hidden size": ("linear_weight", ValueError, dict(linear_weight=torch.randn(7, 6))),
    "weight transposed": ("linear_weight", ValueError, dict(linear_weight=W.T)),
    "weight flat": ("linear_weight.*FSDP", ValueError, dict(linear_weight=torch.randn(35))),
    "weight empty": ("linear_weight.*ZeRO-3", ValueError, dict(linear_weight=torch.empty(0))),
    "weight without rows": ("linear_weight", ValueError, dict(linear_weight=torch.empty(0, 5))),
    "weight on another device": ("linear_weight.*meta", ValueError, dict(linear_weight=W.to("meta"))),
    "target of floats": ("target", TypeError, dict(target=T.float())),
    "target of booleans": ("target", TypeError, dict(target=T.bool())),
    "target is a list": ("target", TypeError, dict(target=[0, 1, 2, 3])),
    "target too short": ("target", ValueError, dict(target=T[:3])),
    "target on another device": ("target.*meta", ValueError, dict(target=T.to("meta"))),
    "label V": ("target: label 7 at flat position 1", ValueError, dict(target=torch.tensor([0, 7, 9, 1]))),
    "label negative": ("target: label -5 at flat position 3", ValueError, dict(target=torch.tensor([0, 1, 2, -5]))),
    "label huge": ("target: label 4294967296", ValueError, dict(target=torch.tensor([0, 1, 2, 2**32]))),
    "-100 with another ignore_index": ("target: label -100", ValueError, dict(target=T - 100, ignore_index=-1)),
    "bias too long": ("linear_bias", ValueError, dict(linear_bias=torch.randn(8))),
    "bias of two dimensions": ("linear_bias", ValueError, dict(linear_bias=torch.randn(1, 7))),
    "bias of integers": ("linear_bias", TypeError, dict(linear_bias=torch.ones(7, dtype=torch.long))),
    "bias on another device": ("linear_bias.*meta", ValueError, dict(linear_bias=torch.randn(7).to("meta"))),
    "softcap 0": ("softcap", ValueError, dict(softcap=0.0)),
    "softcap that fp32 cannot hold": ("softcap.*fp32", ValueError, dict(softcap=1e39)),
    "temperature whose reciprocal fp32 cannot hold": ("temperature.*fp32", ValueError, dict(temperature=1e-39)),
    "softcap negative": ("softcap", ValueError, dict(softcap=-1.0)),
    "softcap nan": ("softcap", ValueError, dict(softcap=math.nan)),
    "softcap a string": ("softcap", TypeError, dict(softcap="30")),
    "logit_scale inf": ("logit_scale", ValueError, dict(logit_scale=math.inf)),
    "logit_scale None": ("logit_scale", TypeError, dict(logit_scale=None)),
    "temperature 0": ("temperature", ValueError, dict(temperature=0.0)),
    "temperature negative": ("temperature", ValueError, dict(temperature=-1)),
    "temperature nan": ("temperature", ValueError, dict(temperature=math.nan)),
    "temperature of a token 0": ("temperature", ValueError, dict(temperature=torch.tensor([1.0, 0, 1, 1]))),
    "temperature of a token nan": ("temperature", ValueError, dict(temperature=torch.tensor([1.0, math.nan, 1, 1]))),
    "temperature of another length": ("temperature", ValueError, dict(temperature=torch.ones(7))),
    "temperature requires grad": ("temperature", TypeError, dict(temperature=torch.ones(4, requires_grad=True))),
    "temperature of integers": ("temperature", TypeError, dict(temperature=torch.ones(4, dtype=torch.long))),
    "ignore_index a float": ("ignore_index", TypeError, dict(ignore_index=-100.0)),
    "ignore_index a boolean": ("ignore_index", TypeError, dict(ignore_index=True)),
    "triton on the CPU": ("backend='triton' cannot run", RuntimeError, dict(options=ComputeOptions(backend="triton"))),
}
CLASS_WEIGHT_CASES = {
    "too short": (ValueError, torch.rand(6)),
    "of two dimensions": (ValueError, torch.rand(7, 1)),
    "of integers": (TypeError, torch.ones(7, dtype=torch.long)),
    "requires grad": (TypeError, torch.rand(7, requires_grad=True)),
    "a list": (TypeError, [1.0] * 7),
    "on another device": (ValueError, torch.rand(7).to("meta")),
}
LOSS_CASES = {
    "reduction batchmean": ("reduction", ValueError, dict(reduction="batchmean")),
    "reduction None": ("reduction", ValueError, dict(reduction=None)),
    "reduction Mean": ("reduction", ValueError, dict(reduction="Mean")),
    "label_smoothing above 1": ("label_smoothing", ValueError, dict(label_smoothing=1.1)),
    "label_smoothing below 0": ("label_smoothing", ValueError, dict(label_smoothing=-0.1)),
    "label_smoothing nan": ("label_smoothing", ValueError, dict(label_smoothing=math.nan)),
    "label_smoothing None": ("label_smoothing", TypeError, dict(label_smoothing=None)),
    "lse_square_scale inf": ("lse_square_scale", ValueError, dict(lse_square_scale=math.inf)),
    "entropy_coef nan": ("entropy_coef", ValueError, dict(entropy_coef=math.nan)),
    "entropy_coef a tensor": ("entropy_coef", TypeError, dict(entropy_coef=torch.tensor(0.1))),
    "return_z_loss 1": ("return_z_loss", TypeError, dict(return_z_loss=1)),
    "return_entropy_loss None": ("return_entropy_loss", TypeError, dict(return_entropy_loss=None)),
    "token_weight too long": ("token_weight", ValueError, dict(token_weight=torch.rand(5))),
    "token_weight of integers": ("token_weight", TypeError, dict(token_weight=T)),
    "token_weight on another device": ("token_weight.*meta", ValueError, dict(token_weight=torch.rand(4).to("meta"))),
}


@pytest.fixture
def nothing_computed(monkeypatch):
    def fail(*_):
        raise AssertionError("the operator ran")

    monkeypatch.setattr(engine, "Forward", fail)


@pytest.mark.parametrize("name, error, change", STATISTICS_CASES.values(), ids=STATISTICS_CASES)
@pytest.mark.parametrize("function", [linear_token_statistics, linear_cross_entropy])
def test_bad_argument_is_accepted_or_found_late(function, name, error, change, nothing_computed):
    """VAL-06"""
    with pytest.raises(error, match=f"^{name}"):
        function(**dict(input=X, linear_weight=W, target=T) | change)


@pytest.mark.parametrize("error, value", CLASS_WEIGHT_CASES.values(), ids=CLASS_WEIGHT_CASES)
def test_bad_class_weight_is_accepted_or_found_late(error, value, nothing_computed):
    """VAL-06"""
    for call in (
        lambda: linear_token_statistics(X, W, T, class_weight=value),
        lambda: linear_cross_entropy(X, W, T, weight=value),
        lambda: cross_entropy(X @ W.T, T, weight=value),
    ):
        with pytest.raises(error, match=r"^(class_)?weight"):
            call()


@pytest.mark.parametrize("name, error, change", LOSS_CASES.values(), ids=LOSS_CASES)
@pytest.mark.parametrize("given", [True, False])
def test_bad_loss_option_is_accepted_or_found_late(given, name, error, change, nothing_computed):
    """VAL-03, VAL-06"""
    with pytest.raises(error, match=f"^{name}"):
        cross_entropy(X @ W.T, T, **change) if given else linear_cross_entropy(X, W, T, **change)


@pytest.mark.parametrize(
    "name, error, arguments",
    [
        ("logits", TypeError, (torch.ones(4, 7, dtype=torch.long), T)),
        ("target", ValueError, (torch.randn(4, 7), T[:3])),
        ("target", ValueError, (torch.randn(7, 4), T)),
        ("target", TypeError, (torch.randn(4, 7), torch.rand(4, 7))),
        ("target: label 7", ValueError, (torch.randn(4, 7), torch.tensor([0, 1, 7, 8]))),
        ("logits: expected shape", ValueError, (torch.randn(4, 0), T)),
    ],
)
def test_bad_logits_or_target_is_accepted(name, error, arguments, nothing_computed):
    """VAL-06"""
    with pytest.raises(error, match=f"^{name}"):
        cross_entropy(*arguments)


@pytest.mark.parametrize("name", ["input", "temperature", "token_weight"])
def test_transposed_tokens_are_taken_in_another_order(name, nothing_computed):
    """Shapes may differ (SHP-08), but a transposed one pairs tokens with the labels of others."""
    arguments = dict(input=torch.randn(2, 3, 5), linear_weight=W, target=torch.zeros(2, 3, dtype=torch.long))
    wrong = torch.randn(3, 2, 5) if name == "input" else torch.rand(3, 1, 2) + 1
    with pytest.raises(ValueError, match=rf"^{name}.*\(3, .*2\).*transpose"):
        linear_cross_entropy(**arguments | {name: wrong})


@pytest.mark.parametrize("shape", [(2, 3), (6,), (1, 6), (2, 1, 3), (6, 1)])
def test_same_tokens_in_another_shape_are_refused(shape):
    """SHP-08"""
    x, t, weight = torch.randn(6, 5), torch.tensor([[0, 1, 2], [3, 4, 5]]), torch.rand(6) + 1
    arguments = dict(token_weight=weight.view(shape), temperature=weight.view(shape))
    got = linear_cross_entropy(x.view(*shape, 5), W, t, **arguments)
    expected = linear_cross_entropy(x, W, t.flatten(), token_weight=weight, temperature=weight)
    assert got == expected


def test_numpy_numbers_are_refused():
    numbers = dict(
        temperature=np.float32(2.0), softcap=np.float64(3.0), ignore_index=np.int64(2), vocab_size=np.int32(7)
    )
    got = linear_cross_entropy(X, W, T, **numbers, label_smoothing=np.float32(0.5))
    assert got == linear_cross_entropy(X, W, T, temperature=2.0, softcap=3.0, ignore_index=2, label_smoothing=0.5)
    for bad in (np.bool_(True), np.float32(2.0)):
        with pytest.raises(TypeError, match=r"^ignore_index"):
            linear_cross_entropy(X, W, T, ignore_index=bad)


@pytest.mark.parametrize("name", ["temperature", "class_weight"])
def test_parameter_is_refused_where_nothing_is_differentiated(name):
    size = len(T) if name == "temperature" else len(W)
    parameter = torch.nn.Parameter(torch.rand(size) + 1)
    with torch.no_grad():
        got = linear_token_statistics(X, W, T, **{name: parameter})
    expected = linear_token_statistics(X, W, T, **{name: parameter.detach()})
    assert torch.equal(got.logprob, expected.logprob) and torch.equal(got.entropy, expected.entropy)


@pytest.mark.parametrize("name", [n for n in liger_entropy.__all__ if n.startswith("Liger")])
@pytest.mark.parametrize("change", [dict(reduction="batchmean"), dict(label_smoothing=2.0), dict(softcap=0.0)], ids=str)
def test_module_finds_a_bad_option_at_its_first_step(name, change):
    """VAL-03, VAL-06: the constructor refuses."""
    with pytest.raises(ValueError, match=f"^{next(iter(change))}"):
        getattr(liger_entropy, name)(**change)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_known_reduction_is_refused(reduction):
    """VAL-03"""
    module = liger_entropy.LigerFusedLinearCrossEntropyLoss(reduction=reduction)
    torch.testing.assert_close(module(W, X, T), F.cross_entropy(X @ W.T, T, reduction=reduction))


@pytest.mark.parametrize("ignore_index", [0, 3, -1, 255, 2**32, 2**40, -(2**40), None])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_ignore_index_is_hard_coded_or_wraps(dtype, ignore_index):
    """VAL-02: an ignored id inside the vocabulary stays a class of the softmax."""
    t = torch.tensor([0, 3, 0, 5, 1], dtype=dtype)
    x, w = torch.randn(5, 4, requires_grad=True), torch.randn(6, 4, requires_grad=True)
    index = -100 if ignore_index is None else ignore_index
    results = []
    for loss in (
        linear_cross_entropy(x, w, t, ignore_index=ignore_index),
        F.cross_entropy(x @ w.T, torch.where(t.long() == index, -100, t.long())),
    ):
        results.append((loss, *torch.autograd.grad(loss, (x, w))))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
def test_label_of_a_narrow_dtype_is_compared_after_wrapping(dtype):
    """VAL-02, AMP-06: uint8 156 is not -100, nor is int8 -1 the label 255."""
    t = torch.tensor([156, 3, 100]).to(dtype)
    t = t if t.min() >= 0 else torch.tensor([100, 3, 100], dtype=dtype)
    x, w = torch.randn(3, 4), torch.randn(200, 4)
    options = dict(weight=torch.rand(200), label_smoothing=0.1)
    for reduction in ("mean", "none"):
        ours = linear_cross_entropy(x, w, t, reduction=reduction, **options)
        torch.testing.assert_close(ours, F.cross_entropy(x @ w.T, t.long(), reduction=reduction, **options))
    out = linear_cross_entropy(x, w, torch.full_like(t, 100), ignore_index=100 + 256, return_token_accuracy=True)
    assert out.loss > 0


@pytest.mark.parametrize("label", [7, -5, 2**40])
@pytest.mark.parametrize("skip_ignored", [True, False])
def test_unchecked_bad_label_gives_a_finite_number(skip_ignored, label):
    """The contract's point 5: with check_labels=False that row is NaN, and only that row, with every option."""
    options = ComputeOptions(check_labels=False, skip_ignored=skip_ignored)
    t = torch.tensor([0, label, -100, 6])
    s = linear_token_statistics(X, W, t, options=options)
    for value in (s.logprob, s.entropy, s.lse, s.smooth_logprob):
        assert value.isnan().tolist() == [False, True, False, False]
    for more in ({}, dict(weight=torch.rand(7)), dict(label_smoothing=0.1), dict(label_smoothing=1.0)):
        loss = linear_cross_entropy(X, W, t, reduction="none", **more, options=options)
        assert loss.isnan().tolist() == [False, True, False, False]
        assert cross_entropy(X @ W.T, t, **more, options=options).isnan()


def test_labels_on_the_other_device_reach_the_kernel():
    """VAL-04: plain CPU tensors need no CUDA call; the meta device stands for another one in the cases above."""
    torch.testing.assert_close(linear_cross_entropy(X, W, T), F.cross_entropy(X @ W.T, T))


def test_neutral_values_are_refused():
    """VAL-05, PAT-30: None and integers where a number is meant."""
    ours = linear_cross_entropy(
        X, W, T, temperature=None, softcap=None, linear_bias=None, weight=None, token_weight=None,
        ignore_index=None, label_smoothing=0, lse_square_scale=0, entropy_coef=0, logit_scale=1, options=None,
    )  # fmt: skip
    torch.testing.assert_close(ours, F.cross_entropy(X @ W.T, T))
    assert torch.equal(linear_cross_entropy(X, W, T, temperature=torch.tensor(1.0)), ours)


@pytest.mark.parametrize("function", [linear_token_statistics, linear_cross_entropy])
def test_misspelt_option_is_swallowed(function):
    """VAL-05"""
    with pytest.raises(TypeError, match="entropy_coefficient"):
        function(X, W, T, entropy_coefficient=0.1)
    with pytest.raises(TypeError, match="positional"):
        function(X, W, T, None)


@pytest.mark.parametrize(
    "change",
    [
        dict(backend="cuda"), dict(backend=None), dict(chunk_bytes=0), dict(chunk_bytes=-1), dict(chunk_bytes=1.5),
        dict(chunk_bytes="big"), dict(chunk_bytes=True), dict(chunk_bytes=None), dict(cache_bytes=-1),
        dict(cache_bytes="all"), dict(cache_bytes=False), dict(skip_ignored=None), dict(skip_ignored=1),
        dict(check_labels="yes"),
    ],
    ids=str,
)  # fmt: skip
def test_bad_compute_option_is_accepted(change):
    """VAL-06"""
    with pytest.raises(ValueError, match=f"^{next(iter(change))}"):
        ComputeOptions(**change)


def test_compute_options_can_be_changed_in_flight():
    with pytest.raises(AttributeError):
        ComputeOptions().backend = "torch"
    assert ComputeOptions() == ComputeOptions(backend="auto", chunk_bytes="auto", cache_bytes="auto")


def test_ordinary_call_warns():
    """A fallback says so once; there is none here."""
    p = problem(6, 5, 11)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss = linear_cross_entropy(p.input.requires_grad_(), p.linear_weight, p.target)
        loss.backward()
