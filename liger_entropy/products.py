"""The matrix products, each with fp32 (fp64 for fp64 inputs) results whatever the operands' dtype."""

from __future__ import annotations

import torch
from torch import Tensor

# Elements; rows of a buffer start at multiples of it, for loads of 128 bits and for TMA.
ROW_ALIGNMENT = 16


def aligned(columns: int) -> int:
    return (columns + ROW_ALIGNMENT - 1) // ROW_ALIGNMENT * ROW_ALIGNMENT


def empty_aligned(like: Tensor, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """[rows, columns], unfilled, each row at a multiple of ROW_ALIGNMENT."""
    return like.new_empty_strided((rows, columns), (aligned(columns), 1), dtype=dtype)


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

    def copies(self, tensor: Tensor | None) -> bool:
        """Its operand is a copy in another dtype."""
        return tensor is not None and not tensor.dtype == self.dtype == self.gradient_dtype

    def operand(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.dtype).to(self.gradient_dtype) if self.copies(tensor) else tensor

    def logits(self, x: Tensor, w: Tensor, out: Tensor) -> Tensor:
        """out [R, C] = x w^T. x [R, D], w [C, D] operands."""
        return self._product(x, w.t(), out)

    def add_input_gradient(self, g: Tensor, w: Tensor, dx: Tensor, first: bool) -> None:
        """dx [R, D] = (0 if first else dx) + g w, in the accumulator's dtype unless first. g [R, C], w [C, D]."""
        if first:
            self._product(g, w, dx)
        elif self.mixed:
            torch.addmm(dx, g, w, out_dtype=self.accumulator, out=dx)
        else:
            torch.addmm(dx, g, w, out=dx)

    def weight_gradient(self, g: Tensor, x: Tensor, out: Tensor) -> None:
        """out [C, D] = g^T x. g [R, C], x [R, D]."""
        self._product(g.t(), x, out)

    def _product(self, a: Tensor, b: Tensor, out: Tensor) -> Tensor:
        """out = a b, rounded once, to out's dtype."""
        if out.dtype == a.dtype:
            return torch.mm(a, b, out=out)
        if not self.mixed:
            return out.copy_(torch.mm(a, b))
        if out.dtype == self.accumulator:
            return torch.mm(a, b, out_dtype=self.accumulator, out=out)
        return out.copy_(torch.mm(a, b, out_dtype=self.accumulator))
