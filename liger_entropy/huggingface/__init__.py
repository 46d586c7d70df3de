"""Patching Hugging Face models: :func:`apply_liger_entropy`, :func:`remove_liger_entropy`, :func:`is_patched`."""

from .patch import apply_liger_entropy, is_patched, remove_liger_entropy

__all__ = ["apply_liger_entropy", "is_patched", "remove_liger_entropy"]
