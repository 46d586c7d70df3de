"""The Triton kernels in the interpreter against the fp64 oracle: options, block edges, caches, strides, -inf, NaN."""

import itertools
import math

import pytest
import torch
from problems import all_losses, all_statistics, check_losses, check_statistics, given, problem, solve

from liger_entropy import ComputeOptions, backends, cross_entropy, linear_cross_entropy, linear_token_statistics

# The interpreter computes with numpy, which warns of the log 0 and exp overflow that the kernels select away.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
TRITON = ComputeOptions(backend="triton")
BLOCK = backends.get("triton").BLOCK_COLUMNS
NAMES = ("linear_bias", "weight", "token_weight", "temperature")
TOGETHER = dict(label_smoothing=0.1, lse_square_scale=1e-2, entropy_coef=0.3, softcap=5.0, logit_scale=0.5)
OPTIONS = {
    "defaults": ((), {}),
    "bias": (("linear_bias",), {}),
    "smoothing": ((), dict(label_smoothing=0.1)),
    "weighted smoothing": (("weight",), dict(label_smoothing=0.3)),
    "z-loss and entropy": ((), dict(lse_square_scale=1e-2, entropy_coef=0.3)),
    "softcap": ((), dict(softcap=3.0)),
    "scale and temperature": ((), dict(logit_scale=-0.5, temperature=0.7)),
    "token temperature": (("temperature",), {}),
    "softcap and token temperature": (("temperature",), dict(softcap=3.0)),
    "everything": (NAMES, TOGETHER | dict(reduction="none")),
}


def compute(**options) -> ComputeOptions:
    return ComputeOptions(backend="triton", **options)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("vocab", [1, 3, 129, 1000])
def test_kernel_is_wrong_with_option(vocab, option):
    names, options = OPTIONS[option]
    check_losses(problem(4, 5, vocab, torch.float32, names, **options), TRITON)


@pytest.mark.parametrize("vocab", [BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 1, 3 * BLOCK])
@pytest.mark.parametrize("option", ["defaults", "everything"])
def test_kernel_is_wrong_at_a_block_edge(option, vocab):
    """NUM-01: padded columns carry no mass."""
    names, options = OPTIONS[option]
    check_losses(problem(3, 4, vocab, torch.float32, names, **options), TRITON)
    names = [n for n in names if n != "token_weight"]
    check_statistics(problem(3, 4, vocab, names=names, softcap=options.get("softcap")), TRITON)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", [127, BLOCK + 1])
def test_kernel_is_wrong_in_half_precision(vocab, dtype):
    check_losses(problem(4, 5, vocab, dtype, NAMES, **TOGETHER), TRITON)
    check_losses(given(problem(4, 5, vocab, dtype, NAMES, **TOGETHER)), TRITON)


@pytest.mark.parametrize("option", [o for o in OPTIONS if o != "bias"])
@pytest.mark.parametrize("vocab", [1, 129, BLOCK + 1])
def test_kernel_is_wrong_on_given_logits(vocab, option):
    names, options = OPTIONS[option]
    check_losses(given(problem(4, 5, vocab, torch.float32, names, **options)), TRITON)


@pytest.mark.parametrize("skip_ignored", [True, False])
@pytest.mark.parametrize("cached", [0, 1, 2, 3])
@pytest.mark.parametrize("option", ["defaults", "everything"])
def test_kernel_reads_the_cache_wrongly(option, cached, skip_ignored):
    """None, one or two of the chunks, or all of the logits kept for the backward, against recomputation."""
    names, options = OPTIONS[option]
    p = problem(5, 4, 2 * BLOCK + 100, torch.float32, names, **options)
    budget = 1 << 30 if cached == 3 else cached * 5 * 4 * BLOCK
    check_losses(p, compute(cache_bytes=budget, chunk_bytes=1, skip_ignored=skip_ignored), k=4.0)


@pytest.mark.parametrize("skip_ignored", [True, False])
@pytest.mark.parametrize("ignored", [[1, 3], [0, 1, 2, 3]], ids=str)
def test_kernel_gives_ignored_rows_a_value_or_gradient(ignored, skip_ignored):
    """NUM-13, NUM-26, SHP-05: exactly 0 in both, also where every row is ignored."""
    p = problem(4, 5, 130, ignored=0)
    p.target[ignored] = -100
    for function in (all_losses, all_statistics):
        result = solve(lambda p, f=function: f(p, compute(skip_ignored=skip_ignored)), p)
        assert (result.gradients["input"][ignored] == 0).all()
        assert all(v.isfinite().all() for v in (result.values | result.gradients).values())
    for name, value in result.values.items():
        assert (value[ignored] == (-1 if name == "prediction" else 0)).all(), name


@pytest.mark.parametrize("masked", ["a few", "a whole block", "all but one"])
def test_kernel_makes_nan_of_masked_classes(masked):
    """NUM-22"""
    vocab, label = 2 * BLOCK, BLOCK + 5
    columns = {
        "a few": torch.arange(0, vocab, 2),
        "a whole block": torch.arange(BLOCK),
        "all but one": torch.tensor([c for c in range(vocab) if c != label]),
    }[masked]
    z = torch.randn(2, vocab).index_fill(1, columns, -math.inf)
    t = torch.full((2,), label)
    results = []
    for backend in ("triton", "torch"):
        leaf = z.clone().requires_grad_()
        out = cross_entropy(
            leaf, t, entropy_coef=0.3, return_entropy_loss=True, options=ComputeOptions(backend=backend)
        )
        out.loss.backward()
        assert out.loss.isfinite() and leaf.grad.isfinite().all() and (leaf.grad[:, columns] == 0).all()
        results.append((out.loss, out.entropy_loss, leaf.grad))
    torch.testing.assert_close(*results)


def test_kernel_hides_or_spreads_a_nan():
    """NUM-23: a NaN logit, a row of -inf, in one block of two."""
    z = torch.randn(5, BLOCK + 3)
    z[1, BLOCK + 1], z[3] = math.nan, -math.inf
    z.requires_grad_()
    out = cross_entropy(z, torch.arange(5), reduction="none", return_entropy_loss=True, options=TRITON)
    for value in (out.loss, out.entropy_loss):
        assert value.isnan().tolist() == [False, True, False, True, False]
    (out.loss + out.entropy_loss).sum().backward()
    assert z.grad[1].isnan().any() and z.grad[[0, 2, 4]].isfinite().all()


@pytest.mark.parametrize("label", [130, -5, 2**40])
def test_kernel_gives_an_unchecked_label_a_finite_value(label):
    t = torch.tensor([0, label, -100, 129])
    options = compute(check_labels=False)
    s = linear_token_statistics(torch.randn(4, 5), torch.randn(130, 5), t, options=options)
    for value in (s.logprob, s.entropy, s.lse, s.smooth_logprob):
        assert value.isnan().tolist() == [False, True, False, False]


@pytest.mark.parametrize("layout", ["transposed weight", "every other row", "strided input", "expanded target"])
def test_kernel_ignores_strides(layout):
    """SHP-02"""
    p = problem(6, 5, 300, names=("linear_bias", "weight"), label_smoothing=0.1)
    if layout == "transposed weight":
        p.linear_weight = torch.randn(5, 300).t()
    elif layout == "every other row":
        p.linear_weight = torch.randn(600, 5)[::2]
        p.options |= dict(linear_bias=torch.randn(600)[::2], weight=torch.rand(600)[::2])
    elif layout == "strided input":
        p.input = torch.randn(5, 6).t()
    else:
        p.target = torch.tensor(7).expand(6)
    check_losses(p, TRITON)


@pytest.mark.parametrize("layout", ["transposed", "every other column", "rows apart"])
def test_kernel_ignores_strides_of_logits(layout):
    """SHP-02"""
    z = {
        "transposed": lambda: torch.randn(300, 4).t(),
        "every other column": lambda: torch.randn(4, 600)[:, ::2],
        "rows apart": lambda: torch.randn(8, 300)[::2],
    }[layout]()
    results = []
    for a in (z, z.contiguous()):
        a = a.detach().requires_grad_()
        loss = cross_entropy(a, torch.tensor([0, 5, -100, 299]), entropy_coef=0.1, options=TRITON)
        results.append((loss, torch.autograd.grad(loss, a)[0]))
    torch.testing.assert_close(*results)


def test_kernel_offsets_are_32_bit(tmp_path):
    """SHP-11: rows 2^31 + 5 elements apart, in a sparse file."""
    stride, vocab = 2**31 + 5, 40
    flat = torch.from_file(str(tmp_path / "logits"), shared=True, size=stride + vocab, dtype=torch.bfloat16)
    far = flat.as_strided((2, vocab), (stride, 1))
    far.copy_(torch.randn(2, vocab))
    results = []
    for z in (far.detach().requires_grad_(), far.clone().requires_grad_()):
        loss = cross_entropy(z, torch.tensor([3, vocab - 1]), entropy_coef=0.3, options=TRITON)
        results.append((loss, torch.autograd.grad(loss, z)[0]))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


FLAGS = ["return_entropy_loss", "return_z_loss", "return_token_accuracy", "return_predicted_tokens"]


@pytest.mark.parametrize("wanted", [c for n in (1, 2, 4) for c in itertools.combinations(FLAGS, n)])
def test_optional_outputs_alias_each_other(wanted):
    """CMP-04: M=4, V=3, the loss is the same whatever else is asked for."""
    p = problem(4, 5, 3)
    options = dict(lse_square_scale=0.1, entropy_coef=0.1)
    exact = all_losses(type(p)(p.target, p.input.double(), p.linear_weight.double(), options=options))
    out = linear_cross_entropy(
        p.input, p.linear_weight, p.target, **options, **dict.fromkeys(wanted, True), options=TRITON
    )
    for flag in ("return_loss", *wanted):
        name = flag.removeprefix("return_")
        torch.testing.assert_close(getattr(out, name), exact[name].to(getattr(out, name).dtype), rtol=1e-5, atol=1e-6)


def test_kernel_writes_to_its_inputs():
    """AG-03: a Triton store does not raise a tensor's version, so the values are compared."""
    p = problem(5, 4, BLOCK + 3, names=NAMES, **TOGETHER).leaves()
    tensors = [p.input, p.linear_weight, p.target, *(p.options[n] for n in NAMES)]
    before = [t.detach().clone() for t in tensors]
    out = all_losses(p, compute(cache_bytes=5 * 4 * BLOCK, chunk_bytes=1))
    for _ in range(2):
        out["loss"].backward(retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))
    z = torch.randn(3, 100, requires_grad=True)
    before = z.detach().clone()
    cross_entropy(z, torch.tensor([1, 2, 3]), options=TRITON).backward()
    assert torch.equal(z, before)


def test_second_backward_of_the_kernel_differs():
    p = problem(5, 4, BLOCK + 3).leaves()
    loss = all_losses(p, compute(cache_bytes=1 << 30))["loss"]
    first, second = (torch.autograd.grad(loss, (p.input, p.linear_weight), retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_compiled_loss_cannot_choose_triton():
    """CMP-02"""
    torch._dynamo.reset()
    x, w, t = torch.randn(4, 5), torch.randn(40, 5, requires_grad=True), torch.tensor([0, -100, 7, 39])
    loss = torch.compile(lambda: linear_cross_entropy(x, w, t, options=TRITON), backend="aot_eager", fullgraph=True)()
    torch.testing.assert_close(loss, linear_cross_entropy(x, w, t))
    loss.backward()


def test_no_tokens_launch_an_empty_grid():
    """SHP-04"""
    x, w = torch.empty(0, 5, requires_grad=True), torch.randn(40, 5, requires_grad=True)
    for options in (TRITON, compute(skip_ignored=False)):
        loss = linear_cross_entropy(x, w, torch.empty(0, dtype=torch.long), entropy_coef=0.1, options=options)
        grads = torch.autograd.grad(loss, (x, w))
        assert loss == 0 and all((g == 0).all() for g in grads)


def test_double_runs_in_single_precision():
    with pytest.raises(RuntimeError, match="float64"):
        linear_cross_entropy(torch.randn(4, 5).double(), torch.randn(7, 5).double(), torch.arange(4), options=TRITON)
