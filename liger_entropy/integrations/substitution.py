"""Putting a function in another one's place, wherever a package has imported it by name."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


class Substitution:
    """``replacement`` stands for ``home.name`` in every loaded module of the package, until :meth:`undo`.

    Modules that are loaded later take the name from ``home`` and so get the replacement; undo finds them too.
    """

    def __init__(self, home: ModuleType, name: str, replacement: Callable[..., Any]):
        self.package = home.__name__.partition(".")[0]
        self.home, self.name = home, name
        self.original, self.replacement = getattr(home, name), replacement
        self._exchange(self.original, self.replacement)

    def undo(self) -> None:
        self._exchange(self.replacement, self.original)

    def _exchange(self, old: Any, new: Any) -> None:
        for path, module in list(sys.modules.items()):
            if path.partition(".")[0] == self.package and getattr(module, "__dict__", {}).get(self.name) is old:
                setattr(module, self.name, new)
        setattr(self.home, self.name, new)
