"""Every kernel on small inputs, as a program to run under a tool: compute-sanitizer --tool memcheck python sanitized.py

Run with PYTORCH_NO_CUDA_MEMORY_CACHING=1, so that every tensor is an allocation whose bounds and writes the tool
knows. initcheck does not know of writes by TMA: `python sanitized.py blind-spot` has a kernel read what another one
stored with a descriptor, and all of it is reported, as is a copy of what cuBLAS wrote. What kernels of ours and cuBLAS
store so is therefore filled with NaN beforehand, for which the results then stand: they must be finite.
"""

import sys

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from liger_entropy import ComputeOptions, backends, cross_entropy, engine, gradients, linear_cross_entropy, planner

TOKENS, HIDDEN, VOCAB = 150, 64, 2900
ROW_KERNELS = {"inspect_kernel", "statistics_kernel", "finish_kernel", "coefficient_kernel", "gradient_kernel"}
PRODUCT_KERNELS = {"product_statistics_kernel", "product_gradient_kernel"}


def fill(owner, name: str) -> None:
    """Have a function return NaN in the memory that it takes, its first result."""
    take = getattr(owner, name)

    def filled(*arguments, **named):
        taken = take(*arguments, **named)
        first = taken[0] if isinstance(taken, tuple) else taken
        if first is not None:
            first.fill_(torch.nan)
        return taken

    setattr(owner, name, filled)


def step(dtype: torch.dtype, given: bool, everything: bool, **compute) -> list[Tensor]:
    torch.manual_seed(0)
    x = torch.randn(TOKENS, VOCAB if given else HIDDEN, device="cuda", dtype=dtype, requires_grad=True)
    w = torch.randn(VOCAB, HIDDEN, device="cuda", dtype=dtype, requires_grad=True)
    y = torch.randint(0, VOCAB, (TOKENS,), device="cuda")
    options = dict(entropy_coef=0.1, return_entropy_loss=True, options=ComputeOptions(**compute))
    if everything:
        y[::5] = -100
        options |= dict(
            weight=torch.rand(VOCAB, device="cuda"), label_smoothing=0.1, lse_square_scale=0.1, softcap=5.0,
            logit_scale=0.7, temperature=torch.rand(TOKENS, device="cuda") + 0.5, return_predicted_tokens=True,
        )  # fmt: skip
        if not given:
            options["linear_bias"] = torch.randn(VOCAB, device="cuda", requires_grad=True)
    output = cross_entropy(x, y, **options) if given else linear_cross_entropy(x, w, y, **options)
    leaves = [x] if given else [x, w, *([options["linear_bias"]] if everything else [])]
    return [output.loss, output.entropy_loss, *torch.autograd.grad(output.loss, leaves)]


def main() -> None:
    """With the parts that long calls have: a start of one block, ragged columns of their own, wide chunks in dw."""
    planner.HEAD_START, engine.MASKED_ROUNDS, planner.MiB = 256 * TOKENS * HIDDEN, 0, 1
    for owner, name in (
        (engine, "empty_aligned"), (engine.Buffer, "view"), (gradients, "_zeros_beyond"),
        (gradients.Accumulation, "_from_free"), (gradients.Accumulation, "_input_gradient"),
    ):  # fmt: skip
        fill(owner, name)
    cases = [dict(given=True), *(dict(given=False, cache_bytes=bytes_) for bytes_ in (0, 700_000, 1 << 30))]
    for dtype in (torch.bfloat16, torch.float32):
        for case in cases:
            for everything in (False, True):
                results = step(dtype, everything=everything, **case)
                finite = torch.stack([r.isfinite().all() for r in results]).tolist()
                assert all(finite), (dtype, everything, case, finite)
    launched = {key[0].__name__ for key in backends.get("triton")._compiled}
    assert launched == ROW_KERNELS | (PRODUCT_KERNELS if torch.cuda.get_device_capability()[0] == 9 else set())


@triton.jit
def store_by_descriptor(desc):
    desc.store([tl.program_id(0) * 64, 0], tl.full((64, 64), 1.0, tl.bfloat16))


@triton.jit
def store_by_pointer(out_ptr):
    tl.store(out_ptr + tl.program_id(0) * 4096 + tl.arange(0, 4096), tl.full((4096,), 1.0, tl.bfloat16))


@triton.jit
def read(z_ptr, out_ptr):
    here = tl.program_id(0) * 4096 + tl.arange(0, 4096)
    tl.store(out_ptr + here, tl.load(z_ptr + here) + 1)


def blind_spot() -> None:
    """Three reads of what was written just before, of which the second and the third are reported."""
    by_pointer, by_descriptor, out = (torch.empty(256, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    store_by_pointer[(4,)](by_pointer)
    store_by_descriptor[(4,)](TensorDescriptor(by_descriptor, [256, 64], [64, 1], [64, 64]))
    read[(4,)](by_pointer, out)
    read[(4,)](by_descriptor, out)
    a = torch.ones(1024, 512, device="cuda", dtype=torch.bfloat16)
    torch.mm(a, a.t(), out_dtype=torch.float32).to(torch.bfloat16)
    torch.cuda.synchronize()


if __name__ == "__main__":
    if sys.argv[1:] == ["blind-spot"]:
        blind_spot()
    else:
        main()
