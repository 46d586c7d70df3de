"""Writes FAMILIES.md: python tests/huggingface/families_table.py > tests/huggingface/FAMILIES.md

test_families.py trains every name and holds it to what is written here.
"""

from __future__ import annotations

import transformers
from families import MATERIALISED, NOT_BUILDABLE, names


def table() -> str:
    """Counts and names, as markdown."""
    every = names()
    built = [name for name in every if name not in NOT_BUILDABLE]
    slow = {name: reason for name, reason in MATERIALISED.items() if name in built}
    fused = [name for name in built if name not in slow]
    lines = [
        f"# Causal language models of transformers {transformers.__version__}",
        "",
        "Written by `python tests/huggingface/families_table.py`; `test_families.py` compares each name, patched and",
        "unpatched, in loss, gradients, logits and entropy.",
        "",
        f"{len(every)} names: {len(built)} built, of which {len(fused)} fused ({len(fused) / len(built):.1%}) and "
        f"{len(slow)} right with their logits computed; {len(every) - len(built)} not buildable here.",
        "",
        "| name | class | loss |",
        "|---|---|---|",
        *(f"| {name} | {every[name]} | {_outcome(name)} |" for name in sorted(every)),
    ]
    return "\n".join(lines)


def _outcome(name: str) -> str:
    if name in NOT_BUILDABLE:
        return f"not buildable: {NOT_BUILDABLE[name]}"
    return f"logits computed: {MATERIALISED[name]}" if name in MATERIALISED else "fused"


if __name__ == "__main__":
    print(table())
