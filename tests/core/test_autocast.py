"""dtypes of inputs and results, and autocast. Cases AMP-01 to AMP-06."""

import pytest
import torch
import torch.nn.functional as F
from problems import all_losses, all_statistics, check_close, check_losses, plain_losses, problem, solve

from liger_entropy import cross_entropy, linear_cross_entropy

AUTOCAST = [torch.bfloat16, torch.float16]


def under(dtype, function):
    def run(p):
        with torch.autocast("cpu", dtype):
            return function(p)

    return run


@pytest.mark.parametrize("dtype", AUTOCAST, ids=str)
@pytest.mark.parametrize("inputs", ["fp32", "half input", "half weight", "half both", "half bias"])
@pytest.mark.parametrize("backward", ["inside", "outside"])
def test_autocast_mixes_dtypes_or_rounds_twice(backward, inputs, dtype):
    """AMP-01: products in the autocast dtype, statistics fp32, gradients in each tensor's own dtype; as exact as
    autocast(F.linear) and fp32 cross-entropy, against fp64 on the operands rounded once."""
    p = problem(9, 6, 1100, names=("linear_bias",), entropy_coef=0.1, lse_square_scale=1e-2)
    half = dict(fp32=(), bias=("linear_bias",)).get(inputs.removeprefix("half "), ("input", "linear_weight"))
    half = (
        (inputs.removeprefix("half ").replace("weight", "linear_weight"),)
        if "put" in inputs or "weight" in inputs
        else half
    )
    for name in half:
        if name == "linear_bias":
            p.options[name] = p.options[name].to(dtype)
        else:
            setattr(p, name, getattr(p, name).to(dtype))
    p = p.leaves()
    tensors = p.differentiable()
    with torch.autocast("cpu", dtype):
        ours, plain = all_losses(p), plain_losses(p)
        grads = torch.autograd.grad(ours["loss"], tensors.values()) if backward == "inside" else None
    grads = torch.autograd.grad(ours["loss"], tensors.values()) if grads is None else grads
    plain_grads = torch.autograd.grad(plain["loss"], tensors.values())
    exact = problem_in_double(p, dtype)
    exact_grads = torch.autograd.grad(plain_losses(exact)["loss"], exact.differentiable().values())
    for name in ("loss", "entropy_loss", "z_loss"):
        assert ours[name].dtype == torch.float32
        check_close(name, ours[name], plain_losses(exact)[name], plain[name], 1100, k=1.0)
    for (name, tensor), ours, right, rough in zip(tensors.items(), grads, exact_grads, plain_grads, strict=True):
        assert ours.dtype == tensor.dtype
        check_close(f"gradient of {name}", ours, right, rough, 1100, k=2.0)


def problem_in_double(p, dtype):
    """fp64 leaves that hold the operands as the product meets them; the bias is never rounded."""
    p = p.leaves()
    for name in ("input", "linear_weight"):
        setattr(p, name, getattr(p, name).detach().to(dtype))
    return p.leaves(torch.float64)


def test_autocast_touches_fp64():
    """AMP-01: torch leaves double alone, so do we."""
    p = problem(5, 6, 11, torch.float64, entropy_coef=0.1)
    exact, ours = solve(all_losses, p), solve(under(torch.bfloat16, all_losses), p)
    for name, value in (exact.values | exact.gradients).items():
        assert torch.equal((ours.values | ours.gradients)[name], value)


@pytest.mark.parametrize("dtype", AUTOCAST, ids=str)
def test_autocast_rounds_given_logits(dtype):
    """AMP-01: torch's cross_entropy runs in fp32 under autocast."""
    z, t = torch.randn(5, 11), torch.tensor([0, 1, -100, 3, 4])
    with torch.autocast("cpu", dtype):
        torch.testing.assert_close(cross_entropy(z, t), F.cross_entropy(z, t))


@pytest.mark.parametrize(
    "input_dtype, weight_dtype",
    [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float16, torch.bfloat16),
     (torch.float64, torch.float32)],
)  # fmt: skip
def test_mixed_dtypes_are_cast_silently(input_dtype, weight_dtype):
    """AMP-02: TypeError that names both dtypes."""
    x, w = torch.randn(4, 5, dtype=input_dtype), torch.randn(7, 5, dtype=weight_dtype)
    with pytest.raises(TypeError) as error:
        linear_cross_entropy(x, w, torch.tensor([0, 1, 2, 3]))
    assert str(input_dtype) in str(error.value) and str(weight_dtype) in str(error.value)


@pytest.mark.parametrize("bias_dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_vector_of_another_dtype_crashes(dtype, bias_dtype):
    """AMP-02: bias, class, token weights and temperatures may have any float dtype; gradients come back in it."""
    p = problem(9, 6, 40, dtype, ("linear_bias", "weight", "token_weight", "temperature"), label_smoothing=0.1)
    p.options |= {n: v.to(bias_dtype) for n, v in p.options.items() if isinstance(v, torch.Tensor)}
    result = check_losses(p, k=4.0)
    assert result.gradients["linear_bias"].dtype == bias_dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_inputs_quantise_the_statistics(dtype):
    """AMP-05: fp32 results; rows 1e-3 nats apart stay apart."""
    p = problem(5, 6, 11, dtype)
    for value in (*all_losses(p).values(), *all_statistics(p).values()):
        assert value.dtype in (torch.float32, torch.int64)
    z = torch.zeros(5, 4, dtype=dtype)
    z[:, 0] = torch.arange(1, 6) * 2.0**-10
    loss = cross_entropy(z, torch.zeros(5, dtype=torch.long), reduction="none")
    assert len(loss.unique()) == 5


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.int8, torch.uint8])
def test_labels_of_another_integer_dtype_are_misread(dtype):
    """AMP-06"""
    p = problem(9, 6, 40, ignored=0)
    exact, ours = all_losses(p), None
    p.target = p.target.to(dtype)
    ours = all_losses(p)
    for name, value in exact.items():
        assert torch.equal(ours[name], value), name
