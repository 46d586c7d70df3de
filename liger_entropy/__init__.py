"""Fused linear cross-entropy with per-token entropy, both differentiable, without the [tokens, vocabulary] logits."""

from .huggingface import apply_liger_entropy, remove_liger_entropy
from .liger_api import liger_cross_entropy, liger_fused_linear_cross_entropy
from .losses import CrossEntropyOutput, cross_entropy, linear_cross_entropy
from .modules import LigerCrossEntropyLoss, LigerFusedLinearCrossEntropyLoss
from .planner import ComputeOptions
from .token_statistics import TokenStatistics, linear_token_statistics

__version__ = "0.1.0"

__all__ = [
    "ComputeOptions",
    "CrossEntropyOutput",
    "LigerCrossEntropyLoss",
    "LigerFusedLinearCrossEntropyLoss",
    "TokenStatistics",
    "apply_liger_entropy",
    "cross_entropy",
    "liger_cross_entropy",
    "liger_fused_linear_cross_entropy",
    "linear_cross_entropy",
    "linear_token_statistics",
    "remove_liger_entropy",
]
