"""How a call is carried out: options, backend, chunk width, cache budget."""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from . import backends
from .notices import warn_once
from .products import aligned

MiB = 1 << 20


@dataclass(frozen=True)
class ComputeOptions:
    """How, not what: none of these changes a result beyond rounding.

    Args:
        backend: ``"triton"`` (CUDA, or CPU under TRITON_INTERPRET=1), ``"torch"`` (any device), or ``"auto"``: Triton
            on CUDA, torch elsewhere and for fp64. An explicit backend that cannot run raises RuntimeError.
        chunk_bytes: size of the buffer for one chunk's fp32 logits, or half gradients where the kernels make the
            products (half dtypes on Hopper GPUs); ``"auto"``: see :func:`chunk_widths`. A chunk is at least one block
            of columns wide (1024; 256 where the kernels make the products).
        cache_bytes: how many bytes of logits the forward may keep for the backward, which then recomputes only the
            rest and for a moment takes up to half as many again. ``"auto"``: a quarter of the GPU memory that is free
            then after setting the gradients' room aside; nothing on CPU, while compiling, during CUDA-graph capture,
            or where saved tensors are recomputed or moved (non-reentrant activation checkpoints, offloading). A cache
            that cannot be allocated is left out, with one warning.
        skip_ignored: drop ignored tokens before the first product. Costs one host sync, shared with check_labels.
        check_labels: raise ValueError for a label outside the vocabulary; when off, such a token's outputs are NaN.

    Raises:
        ValueError: for any other value.
    """

    backend: Literal["auto", "torch", "triton"] = "auto"
    chunk_bytes: int | Literal["auto"] = "auto"
    cache_bytes: int | Literal["auto"] = "auto"
    skip_ignored: bool = True
    check_labels: bool = True

    def __post_init__(self):
        if self.backend not in ("auto", "torch", "triton"):
            raise ValueError(f"backend: expected 'auto', 'torch' or 'triton', got {self.backend!r}")
        for name, least in (("chunk_bytes", 1), ("cache_bytes", 0)):
            value = getattr(self, name)
            is_count = isinstance(value, int) and not isinstance(value, bool)
            if value != "auto" and not (is_count and value >= least):
                raise ValueError(f"{name}: expected 'auto' or an integer >= {least}, got {value!r}")
        for name in ("skip_ignored", "check_labels"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}: expected True or False, got {getattr(self, name)!r}")


def checked_options(options: ComputeOptions | None) -> ComputeOptions:
    if options is not None and not isinstance(options, ComputeOptions):
        raise TypeError(f"options: expected a ComputeOptions or None, got {type(options).__name__}")
    return options or ComputeOptions()


# Not functools.cache, which Dynamo looks through, with a warning.
_known: dict[object, object] = {}


def _once(key: object, find: Callable[[], Any]) -> Any:
    if key not in _known:
        _known[key] = find()
    return _known[key]


@torch.compiler.assume_constant_result
def triton_missing() -> str | None:
    """Why Triton cannot be imported, or None."""
    return _once("triton", _look_for_triton)


def _look_for_triton() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    try:
        backends.get("triton")
    except Exception as error:
        return f"triton cannot be imported: {error}"
    return None


def _triton_refusal(device: torch.device, dtype: torch.dtype) -> str | None:
    if dtype == torch.float64:
        return "its kernels compute in fp32 and the input is float64"
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return (
            f"the input is on {device.type}; Triton runs on CUDA, or on CPU with TRITON_INTERPRET=1 set before import"
        )
    return triton_missing()


def choose_backend(requested: str, device: torch.device, dtype: torch.dtype) -> str:
    """``"torch"`` or ``"triton"``. Raises RuntimeError if an explicit choice cannot run."""
    if requested == "torch":
        return "torch"
    refusal = _triton_refusal(device, dtype)
    if requested == "triton" and refusal:
        raise RuntimeError(f"backend='triton' cannot run: {refusal}")
    if requested == "triton" or (device.type == "cuda" and not refusal):
        return "triton"
    if device.type == "cuda" and dtype != torch.float64:
        warn_once(f"using the torch backend on a CUDA device because {refusal}")
    return "torch"


@torch.compiler.assume_constant_result
def _is_hopper(device: torch.device) -> bool:
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return _once(device, lambda: torch.cuda.get_device_capability(device)[0] == 9)


def choose_kernels(backend: str, weight: Tensor | None, dtype: torch.dtype) -> str:
    """``"hopper"``, whose kernels make the products, in place of ``"triton"`` where TMA can read both operands."""
    if backend != "triton" or weight is None or dtype.itemsize != 2 or not _is_hopper(weight.device):
        return backend
    depth, (row_stride, column_stride) = weight.shape[1], weight.stride()
    fits = depth % 8 == 0 and column_stride == 1 and row_stride % 8 == 0 and row_stride >= depth
    return "hopper" if fits else backend


@dataclass(frozen=True)
class Widths:
    """Columns of chunks: whole blocks of the backend, or the whole vocabulary where that is smaller."""

    logits: int  # fp32 logits, in the forward and in a wide chunk of the backward
    gradient: int  # a chunk of the backward that takes memory of its own, beside the accumulator of dx
    wide: int  # the most of a chunk that the backward puts into the unwritten end of dw; 0: none


def chunk_widths(rows: int, vocab: int, backend: str, chunk_bytes: int | str, copies: bool = False) -> Widths:
    """Automatic: torch takes one block, so that a tile is still in the processor's cache when it is read again.

    Triton takes 1/64 of the vocabulary in the backward (1.6 % of the fp32 logits), twice that in the forward, which has
    no accumulator beside it, and eight times that in the end of dw; below 2048 rows at least 32 MiB, where wide
    products keep the GPU busy and the chunk is small beside the weight. Measured on an H200 at T=8192, D=4096,
    V=128256 (torch 2.11, 2026-12-01): products 1024, 2048 and 4096 wide took 13.7, 12.8 and 12.9 ms a pass over the
    vocabulary, a whole step 58.8, 55.9 and 55.3 ms.

    Kernels that make the products have no fp32 logits: the forward is one chunk and the backward takes 1/16 (3.1 % of
    the fp32 logits), and all of the room that dw has. Where they need `copies` of the weight, which are as wide, the
    forward and the backward take 1/32, and four times that in the end of dw. A step of benchmarks/gpu_limits.py without
    a cache, ms, in turn in one process (H200, torch 2.11, triton 3.6, 2026-12-01):

    T, D, V                in dw at most 1/8 of V, 1/4, all that fits    memory of its own: 1/32, 1/20, 1/16
    4096, 2048, 151936     16.51, 15.55, 15.48                           15.70, 15.56, 15.43
    2048, 4096, 131072     14.01, 13.41, 13.39                           13.40, 13.32, 13.05
    8192, 4096, 128256     52.98, 51.10, 51.79                           51.97, 51.13, 50.81
    8192, 2304, 256000                                                   60.15, 58.68, 58.18
    """
    module = backends.get(backend)
    makes_products, block = module.MAKES_PRODUCTS, module.BLOCK_COLUMNS
    row_bytes = (2 if makes_products else 4) * max(rows, 1)
    if chunk_bytes != "auto":
        given = _whole_blocks(int(chunk_bytes) // row_bytes // block, block, vocab)
        return Widths(max(1, vocab) if makes_products and not copies else given, given, 0)
    if backend == "torch":
        one = _whole_blocks(1, block, vocab)
        return Widths(one, one, 0)
    least = 32 * MiB // row_bytes if rows < 2048 else 0
    share = 64 if not makes_products else 32 if copies else 16
    gradient = _whole_blocks(round(max(vocab / share, least) / block), block, vocab)
    if makes_products and copies:
        return Widths(gradient, gradient, min(vocab, 4 * gradient))
    if makes_products:
        return Widths(max(1, vocab), gradient, vocab)
    return Widths(min(vocab, 2 * gradient), gradient, min(vocab, 8 * gradient))


# Multiplications: 0.35 ms at the 700e12 half operations a second of an H200, about as long as its host takes to read
# the count of kept rows and to launch what follows.
HEAD_START = 125e9


def head_start(rows: int, hidden: int, backend: str) -> int:
    """Columns of the forward that a Hopper GPU works on while the host waits for the count of kept rows. If rows are to
    be dropped the work is done again, in time that would have been lost anyway. 0 for the other backends, which may be
    too slow for that."""
    module = backends.get(backend)
    if not module.MAKES_PRODUCTS:
        return 0
    return math.ceil(HEAD_START / max(rows * hidden, 1) / module.BLOCK_COLUMNS) * module.BLOCK_COLUMNS


def chunk_columns(rows: int, vocab: int, backend: str, chunk_bytes: int | str) -> int:
    """Columns of the widest chunk of fp32 logits that takes memory of its own."""
    return chunk_widths(rows, vocab, backend, chunk_bytes).logits


def _whole_blocks(blocks: int, block: int, vocab: int) -> int:
    return max(1, min(vocab, max(1, blocks) * block))


def cache_columns(rows: int, vocab: int, block: int, budget: int, itemsize: int) -> int:
    """Leading columns whose logits, in aligned rows, fit the budget: whole blocks, or the whole vocabulary."""
    fitting = budget // (itemsize * max(rows, 1))
    return vocab if fitting >= aligned(vocab) else fitting // block * block


def free_memory(device: torch.device) -> int:
    """Bytes that the device has free, with what PyTorch's allocator holds unused."""
    free, _ = torch.cuda.mem_get_info(device)
    # memory_reserved and memory_allocated each make and sort all 300 entries for one number.
    statistics = torch.cuda.memory.memory_stats_as_nested_dict(device)
    reserved, allocated = (statistics[f"{kind}_bytes"]["all"]["current"] for kind in ("reserved", "allocated"))
    return free + reserved - allocated


def free_for_cache(option: int | str, device: torch.device) -> int:
    """Bytes of which the cache may take its share; 0 where it takes none, or where it need not be known."""
    if option != "auto" or device.type != "cuda" or not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return 0
    hooked = torch._C._autograd._top_saved_tensors_default_hooks(False) is not None  # type: ignore[attr-defined]
    return 0 if hooked or torch.cuda.is_current_stream_capturing() else free_memory(device)


def cache_budget(option: int | str, free: int, gradient_bytes: int) -> int:
    """Bytes for the cache. gradient_bytes is what the backward will allocate beside it."""
    return max(0, free - gradient_bytes) // 4 if option == "auto" else int(option)
