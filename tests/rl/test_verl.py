"""verl's linear_cross_entropy: its results, what it does not take, and its place in the package."""

import importlib
import sys

import oracle
import pytest
import torch
import torch.nn.functional as F
from measure import memory

from liger_entropy import ComputeOptions
from liger_entropy.integrations import verl as integration
from liger_entropy.integrations.verl import apply_to_verl, linear_cross_entropy, remove_from_verl


def problem(T=23, D=40, V=1031, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(T, D, generator=generator).to(dtype).requires_grad_()
    w = (torch.randn(V, D, generator=generator) / 3).to(dtype).requires_grad_()
    return x, w, torch.randint(V, (T,), generator=generator)


def exact(x, w, y, bias=None):
    """logprob and entropy [T] in fp64, 0 at ignored labels."""
    statistics = oracle.statistics(oracle.logits_of(x.double(), w.double(), linear_bias=bias), y)
    return statistics["logprob"], statistics["entropy"]


def described(x, w, y, temperature=1.0):
    """verl's description of the function, word for word, on full logits in fp64."""
    z = (x.double() @ w.double().t()) / temperature
    probabilities = F.softmax(z, dim=-1)
    return -F.cross_entropy(z, y, reduction="none"), torch.logsumexp(z, dim=-1) - (probabilities * z).sum(-1)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean", "MEAN"])
def test_results_are_those_of_verls_description(reduction):
    x, w, y = problem()
    logprobs, entropy = linear_cross_entropy(x, w, y, 0.7, reduction)
    want, want_entropy = described(x, w, y, 0.7)
    if reduction != "none":
        want = getattr(want, reduction.lower())()
    g, h = torch.randn_like(logprobs), torch.randn_like(entropy)
    got = torch.autograd.grad((logprobs * g).sum() + (entropy * h).sum(), (x, w))
    expected = torch.autograd.grad((want * g).sum() + (want_entropy * h).sum(), (x, w))
    assert logprobs.dtype == entropy.dtype == torch.float32
    assert entropy.shape == (23,), "the reduction must leave the entropy per token"
    torch.testing.assert_close(logprobs.double(), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), want_entropy, rtol=1e-5, atol=1e-5)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_mean_counts_every_label_that_bytes_hold():
    x, w, y = problem()
    y = y % 200
    y[:5] = 156  # -100 modulo 256
    mean = linear_cross_entropy(x, w, y.to(torch.uint8), reduction="mean")[0]
    assert mean == linear_cross_entropy(x, w, y, reduction="mean")[0]


def test_no_ignore_index_is_minus_100():
    x, w, y = problem()
    y[::3] = -100
    for reduction in ("none", "mean"):
        ours, default = (linear_cross_entropy(x, w, y, 1.0, reduction, **k)[0] for k in ({"ignore_index": None}, {}))
        assert torch.equal(ours, default)


def test_logprobs_are_not_losses():
    x, w, y = problem()
    assert (linear_cross_entropy(x, w, y)[0] <= 0).all()


def test_three_dimensional_hidden_gives_flat_results():
    x, w, y = problem(T=24)
    flat = linear_cross_entropy(x, w, y)
    batched = linear_cross_entropy(x.view(3, 8, -1), w, y.view(3, 8))
    for a, b in zip(flat, batched, strict=True):
        assert b.shape == (24,)
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_weight_of_the_first_release_is_transposed_and_keeps_its_gradient():
    x, w, y = problem()
    first = w.detach().t().contiguous().requires_grad_()  # [D, V]
    logprobs, entropy = linear_cross_entropy(x, w, y)
    old_logprobs, old_entropy = linear_cross_entropy(x, first, y)
    torch.testing.assert_close(logprobs, old_logprobs)
    (gradient,) = torch.autograd.grad(logprobs.sum() + entropy.sum(), w)
    (old_gradient,) = torch.autograd.grad(old_logprobs.sum() + old_entropy.sum(), first)
    torch.testing.assert_close(gradient.t(), old_gradient)


def test_square_weight_is_vocabulary_first():
    x, w, y = problem(V=40)
    torch.testing.assert_close(linear_cross_entropy(x, w, y)[0].double(), described(x, w, y)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "temperature",
    [
        2,
        torch.tensor(0.5),
        torch.linspace(0.5, 2.0, 24),
        torch.linspace(0.5, 2.0, 24).view(3, 8),
        torch.tensor([[0.5], [1.0], [2.0]]),
    ],
    ids=["int", "scalar tensor", "per token", "per token in the labels' shape", "per sequence"],
)
def test_temperature_of_every_kind_scales_logprob_and_entropy(temperature):
    x, w, y = problem(T=24)
    logprobs, entropy = linear_cross_entropy(x.view(3, 8, -1), w, y.view(3, 8), temperature)
    per_token = torch.as_tensor(temperature, dtype=torch.float64)
    per_token = per_token.reshape(-1) if per_token.numel() == 24 else per_token.expand(3, 8).reshape(-1)
    want, want_entropy = described(x, w, y, per_token[:, None])
    torch.testing.assert_close(logprobs.double(), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), want_entropy, rtol=1e-5, atol=1e-5)


def test_one_temperature_per_sequence_without_a_dimension_of_tokens_is_refused():
    x, w, y = problem(T=9)
    with pytest.raises(ValueError, match="temperature"):
        linear_cross_entropy(x.view(3, 3, -1), w, y.view(3, 3), torch.ones(3))


def test_ignored_labels_are_zero_and_the_mean_counts_the_others():
    x, w, y = problem()
    y[::3] = -100
    logprobs, entropy = linear_cross_entropy(x, w, y)
    want, want_entropy = exact(x, w, y)
    torch.testing.assert_close(logprobs.double(), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), want_entropy, rtol=1e-5, atol=1e-5)
    mean, _ = linear_cross_entropy(x, w, y, reduction="mean")
    torch.testing.assert_close(mean.double(), want.sum() / (y != -100).sum(), rtol=1e-5, atol=1e-5)
    (dx,) = torch.autograd.grad(logprobs.sum() + entropy.sum(), x)
    assert (dx[::3] == 0).all() and (dx[1::3] != 0).any()


def test_mean_of_nothing_is_zero_with_zero_gradient():
    x, w, y = problem()
    mean, _ = linear_cross_entropy(x, w, torch.full_like(y, -100), reduction="mean")
    gradients = torch.autograd.grad(mean, (x, w))
    assert mean == 0 and all((g == 0).all() for g in gradients)


def test_bias_and_non_contiguous_inputs():
    _, w, y = problem(T=24)
    bias = torch.randn(len(w), requires_grad=True)
    strided = torch.randn(48, 80)[::2, ::2]
    logprobs, entropy = linear_cross_entropy(
        strided, w.detach().t().contiguous().t(), y.view(6, 4).t().reshape(-1), bias=bias
    )
    want, want_entropy = exact(strided, w, y.view(6, 4).t().reshape(-1), bias)
    torch.testing.assert_close(logprobs.double(), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), want_entropy, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(*torch.autograd.grad(logprobs.sum(), bias), *torch.autograd.grad(want.sum(), bias))


def test_a_frozen_head_costs_no_gradient_of_its_size():
    x, w, y = problem(D=256, V=8192)
    w.requires_grad_(False)

    def step():
        logprobs, entropy = linear_cross_entropy(x, w, y)
        (logprobs.sum() + entropy.sum()).backward()

    assert memory(step).largest < 8192 * 256 * 4
    assert x.grad is not None and w.grad is None


def test_bf16_statistics_are_fp32_and_as_exact_as_their_operands():
    x, w, y = problem(dtype=torch.bfloat16)
    logprobs, entropy = linear_cross_entropy(x, w, y)
    want, want_entropy = described(x, w, y)
    torch.testing.assert_close(logprobs.double(), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), want_entropy, rtol=1e-5, atol=1e-5)


def test_unknown_reduction_is_refused_before_any_work():
    x, w, y = problem()
    for reduction in ("batchmean", None, 1):
        with pytest.raises(ValueError, match="reduction"):
            linear_cross_entropy(x, w, y, 1.0, reduction)


KERNEL = """
import torch

class LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, labels, temperature=1.0, reduction="none", dist_process_group=None):
        raise AssertionError("verl's own kernel was called")

    @staticmethod
    def backward(ctx, dlogprobs, dentropy):
        raise AssertionError

linear_cross_entropy = LinearCrossEntropy.apply
"""
LAZY = """
def forward_with_triton_backend(hidden, weight, labels, temperature=1.0):
    from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy
    return linear_cross_entropy(hidden, weight, labels, temperature, "none")
"""
EAGER = """
from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy

def fused_output_processor(hidden, weight, labels, temperature=1.0):
    return linear_cross_entropy(hidden, weight, labels, temperature, "none", None)
"""


@pytest.fixture
def verl(tmp_path, monkeypatch):
    """A package of verl's layout, whose own kernel refuses to run."""
    files = {
        "__init__.py": "__version__ = '0.9.1'\n", "utils/__init__.py": "", "utils/kernel/__init__.py": "",
        "utils/kernel/linear_cross_entropy.py": KERNEL, "models/__init__.py": "", "models/lazy.py": LAZY,
        "models/eager.py": EAGER, "models/late.py": EAGER,
    }  # fmt: skip
    for name, text in files.items():
        path = tmp_path / "verl" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    yield tmp_path / "verl"
    remove_from_verl()
    for name in [name for name in sys.modules if name.partition(".")[0] == "verl"]:
        del sys.modules[name]
    sys.modules.pop("liger_entropy.integrations.verl_plugin", None)


def check_fused(function):
    x, w, y = problem()
    logprobs, entropy = function(x, w, y, 0.5)
    want, want_entropy = described(x, w, y, 0.5)
    torch.testing.assert_close(logprobs.double(), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), want_entropy, rtol=1e-5, atol=1e-5)


def check_own(function):
    with pytest.raises(AssertionError, match="own kernel"):
        function(*problem())


def test_apply_reaches_every_import_and_remove_undoes_it(verl):
    """Some of verl's models import the function when called, Megatron's when loaded, before or after the patch."""
    lazy, eager = importlib.import_module("verl.models.lazy"), importlib.import_module("verl.models.eager")
    apply_to_verl()
    late = importlib.import_module("verl.models.late")
    for function in (lazy.forward_with_triton_backend, eager.fused_output_processor, late.fused_output_processor):
        check_fused(function)
    remove_from_verl()
    for function in (lazy.forward_with_triton_backend, eager.fused_output_processor, late.fused_output_processor):
        check_own(function)
    remove_from_verl()  # nothing to undo


def test_applying_twice_is_undone_once_and_replaces_the_options(verl):
    eager = importlib.import_module("verl.models.eager")
    apply_to_verl()
    apply_to_verl(ComputeOptions(check_labels=False))
    assert integration._active.replacement.keywords["options"].check_labels is False
    check_fused(eager.fused_output_processor)
    remove_from_verl()
    check_own(eager.fused_output_processor)


def test_the_plugin_module_applies_on_import(verl):
    eager = importlib.import_module("verl.models.eager")
    importlib.import_module("liger_entropy.integrations.verl_plugin")
    check_fused(eager.fused_output_processor)


def test_a_verl_too_old_is_refused(verl):
    (verl / "__init__.py").write_text("__version__ = '0.3.0'\n")
    with pytest.raises(RuntimeError, match=r"0\.3\.0.*0\.4"):
        apply_to_verl()


def test_a_verl_with_other_arguments_is_refused_and_left_alone(verl):
    path = verl / "utils/kernel/linear_cross_entropy.py"
    path.write_text(KERNEL.replace("dist_process_group=None", "group=None, top_k=0"))
    with pytest.raises(RuntimeError, match="top_k"):
        apply_to_verl()
    module = importlib.import_module("verl.utils.kernel.linear_cross_entropy")
    assert module.linear_cross_entropy.__self__ is module.LinearCrossEntropy


def test_without_verl_the_error_is_an_import_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "verl", None)
    with pytest.raises(ImportError):
        apply_to_verl()
