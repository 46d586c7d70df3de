"""Patching Hugging Face models: :func:`apply_liger_entropy`, :func:`remove_liger_entropy`, :func:`is_patched`.

:class:`EntropyCallback` puts the entropy into the Trainer's log.
"""

from typing import TYPE_CHECKING, Any

from .patch import apply_liger_entropy, is_patched, remove_liger_entropy

if TYPE_CHECKING:
    from .callback import EntropyCallback

__all__ = ["EntropyCallback", "apply_liger_entropy", "is_patched", "remove_liger_entropy"]


def __getattr__(name: str) -> Any:
    """The callback imports transformers, which nothing else here needs and which takes seconds."""
    if name == "EntropyCallback":
        from .callback import EntropyCallback

        return EntropyCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
