"""Real text for the runs: Python's own standard library, cut by a tokenizer made on the spot."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from liger_entropy.demo.text import batches, encode, read_corpus, train_tokenizer

# More than one block of columns of either backend (1024), and no multiple of anything.
VOCABULARY = 1100
BATCH, LENGTH = 4, 33
# The first tokens of every window are a prompt without labels, as in instruction tuning.
PROMPT = 5
TRAIN_CHARACTERS, HELD_OUT_CHARACTERS = 300_000, 60_000


@dataclass(frozen=True)
class Text:
    train: Tensor  # [N] token ids
    held_out: Tensor  # [M], of other files
    digest: str  # names the tokens: trajectories on other tokens cannot be compared


@functools.cache
def text() -> Text:
    corpus = read_corpus(None)
    train, held_out = corpus.train[:TRAIN_CHARACTERS], corpus.held_out[:HELD_OUT_CHARACTERS]
    tokenizer = train_tokenizer(train, VOCABULARY)
    parts = encode(tokenizer, train), encode(tokenizer, held_out)
    digest = hashlib.sha256(torch.cat(parts).numpy().tobytes()).hexdigest()[:16]
    return Text(*parts, digest)


def training_batches() -> Iterator[tuple[Tensor, Tensor]]:
    """Endless ``(ids, labels)``, each ``[BATCH, LENGTH]``, the same at every call."""
    for ids in batches(text().train, BATCH, LENGTH, seed=0):
        yield ids, with_prompt_ignored(ids)


def held_out_batch() -> Tensor:  # [8, LENGTH]
    return next(batches(text().held_out, 8, LENGTH, seed=1))


def with_prompt_ignored(ids: Tensor) -> Tensor:
    return torch.cat([torch.full_like(ids[:, :PROMPT], -100), ids[:, PROMPT:]], dim=1)
