"""Fallbacks say so, once."""

from __future__ import annotations

import functools
import warnings


@functools.cache
def warn_once(message: str) -> None:
    warnings.warn(f"liger_entropy: {message}", stacklevel=2)
