"""The task: write four digits whose sum is the number asked for. Most numbers have hundreds of right answers."""

from __future__ import annotations

from itertools import product

CHARACTERS = "0123456789=|"  # | pads
DIGITS = 4
PAD = CHARACTERS.index("|")
SUMS = range(8, 29)


def encode(text: str) -> list[int]:
    return [CHARACTERS.index(c) for c in text]


def decode(ids: list[int]) -> str:
    return "".join(CHARACTERS[i] for i in ids)


def prompt(total: int) -> str:
    return f"{total:02d}="


def answers(total: int) -> int:
    """How many completions are right."""
    return sum(sum(digits) == total for digits in product(range(10), repeat=DIGITS))


def reward(total: int, completion: str) -> float:
    """1 for four digits with the right sum; less the further off; 0 where a character is no digit."""
    if not completion.isdigit():
        return 0.0
    return max(0.0, 1.0 - abs(total - sum(map(int, completion))) / 10) if completion else 0.0
