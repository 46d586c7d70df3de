"""The matrix products, each with fp32 (fp64 for fp64 inputs) results whatever the operands' dtype."""

from __future__ import annotations

import torch
from torch import Tensor


class Products:
    """Products of operands rounded to ``dtype``, the dtype that a plain ``F.linear`` would multiply in.

    On CUDA half operands go to cuBLAS with fp32 output (the speed of half output). Elsewhere they are widened chunk by
    chunk and multiplied in fp32, which is exact for them, and on processors without bf16 arithmetic 6 to 100 times
    faster than a bf16 product.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device):
        self.dtype = dtype
        self.accumulator = torch.float64 if dtype == torch.float64 else torch.float32
        # Half operands with an fp32 result in one call.
        self.mixed = device.type == "cuda" and torch.version.hip is None and dtype.itemsize == 2
        # dtype in which a chunk's gradient enters the products.
        self.gradient_dtype = dtype if self.mixed else self.accumulator

    def operand(self, tensor: Tensor) -> Tensor:
        if tensor.dtype == self.dtype == self.gradient_dtype:
            return tensor
        return tensor.to(self.dtype).to(self.gradient_dtype)

    def logits(self, x: Tensor, w: Tensor, out: Tensor) -> Tensor:
        """x [R, D], w [C, D] operands -> out [R, C]."""
        if self.mixed:
            return torch.mm(x, w.t(), out_dtype=self.accumulator, out=out)
        return torch.mm(x, w.t(), out=out)

    def add_input_gradient(self, g: Tensor, w: Tensor, dx: Tensor, first: bool) -> None:
        """dx [R, D] = (0 if first else dx) + g w, with g [R, C], w [C, D]."""
        beta = 0 if first else 1
        if self.mixed:
            torch.addmm(dx, g, w, out_dtype=self.accumulator, beta=beta, out=dx)
        else:
            torch.addmm(dx, g, w, beta=beta, out=dx)

    def weight_gradient(self, g: Tensor, x: Tensor, out: Tensor) -> None:
        """out [C, D] = g^T x with one rounding to out's dtype. g [R, C], x [R, D]."""
        if out.dtype == g.dtype:
            torch.mm(g.t(), x, out=out)
        elif self.mixed and out.dtype == self.accumulator:
            torch.mm(g.t(), x, out_dtype=self.accumulator, out=out)
        else:
            out.copy_(torch.mm(g.t(), x))
