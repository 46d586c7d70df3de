"""The backends: ``eager`` (plain torch, any device), ``triton`` (CUDA, or CPU under TRITON_INTERPRET=1) and ``hopper``,
which takes triton's place where its kernels can make the products themselves.

All offer ``Statistics``, ``Gradient``, ``inspect``, ``finish`` and ``coefficients`` with the same arguments; ``get``
picks one by name.
"""

from __future__ import annotations

import importlib
from types import ModuleType

import torch

MODULES = {"torch": "eager", "triton": "triton", "hopper": "hopper"}


# Dynamo cannot trace an import; it would look through functools.cache, which would hide the mark.
@torch.compiler.assume_constant_result
def get(name: str) -> ModuleType:
    """The backend module of that name, imported on first use: Triton is not needed before."""
    return importlib.import_module(f"{__name__}.{MODULES[name]}")
