"""The libraries compared. Each makes a function (x, w, y) -> (logprob [T], entropy [T] or None), or says why not."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_entropy import ComputeOptions, linear_token_statistics

Statistics = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]]


class Missing(Exception):
    """Why an implementation cannot run here."""


def _need(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise Missing(f"{package} is not installed")


def ours(**options) -> Statistics:
    compute = ComputeOptions(**options)

    def run(x, w, y):
        statistics = linear_token_statistics(x, w, y, options=compute, fields=("logprob", "entropy"))
        return statistics.logprob, statistics.entropy

    return run


def torch_eager() -> Statistics:
    def run(x, w, y):
        log_p = (x @ w.t()).float().log_softmax(-1)
        return log_p.gather(1, y[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)

    return run


def torch_compiled() -> Statistics:
    return torch.compile(torch_eager())


def torch_linear_cross_entropy() -> Statistics:
    if not hasattr(F, "linear_cross_entropy"):
        raise Missing(f"torch {torch.__version__} has no F.linear_cross_entropy")
    from torch.nn.modules.linear_cross_entropy import LinearCrossEntropyOptions

    def run(x, w, y):
        return -F.linear_cross_entropy(x, w, y, reduction="none", options=LinearCrossEntropyOptions()), None

    return run


def liger_flsce() -> Statistics:
    _need("liger_kernel")
    from liger_kernel.ops.fused_linear_scaled_cross_entropy import LigerFusedLinearScaledCrossEntropyFunction

    def run(x, w, y):
        nll, entropy = LigerFusedLinearScaledCrossEntropyFunction.apply(x, w, y, 1.0, -100, 1, True)
        return -nll, entropy

    return run


def liger_flce() -> Statistics:
    """Liger's Triton loss; with reduction "none" it works a second time in the backward."""
    _need("liger_kernel")
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    def run(x, w, y):
        loss = liger_fused_linear_cross_entropy(x, w, y, reduction="none", accum_dtype=torch.float32)
        assert isinstance(loss, Tensor)
        return -loss, None

    return run


def verl() -> Statistics:
    if importlib.util.find_spec("verl") is None:
        raise Missing("verl is not installed")
    from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy

    return lambda x, w, y: linear_cross_entropy(x, w, y, 1.0, "none", None)


def cce() -> Statistics:
    _need("cut_cross_entropy")
    from cut_cross_entropy import linear_cross_entropy

    return lambda x, w, y: (-linear_cross_entropy(x, w, y, reduction="none"), None)


def quack() -> Statistics:
    """Its chunked loss has the mean only, so one number stands for all tokens."""
    _need("quack")
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    return lambda x, w, y: (-chunked_linear_cross_entropy(x, w, y), None)


def trl() -> Statistics:
    """The function behind TRL's fused head."""
    _need("trl")
    from trl.kernels import ChunkedLogProbFunction

    def run(x, w, y):
        logprob, entropy, *_ = ChunkedLogProbFunction.apply(
            x, w, None, y, 1.0, 32768, None, 1.0, ("log_probs", "entropy")
        )
        return logprob, entropy

    return run


IMPLEMENTATIONS: dict[str, Callable[[], Statistics]] = {
    "liger_entropy": ours,
    "liger_entropy, no cache": lambda: ours(cache_bytes=0),
    "torch eager": torch_eager,
    "torch.compile": torch_compiled,
    "F.linear_cross_entropy": torch_linear_cross_entropy,
    "Liger FLSCE": liger_flsce,
    "Liger FLCE": liger_flce,
    "verl kernel": verl,
    "CCE": cce,
    "quack": quack,
    "TRL fused head": trl,
}
