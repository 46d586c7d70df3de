"""The demo's text, its tokenizer and its batches; nothing comes from a network."""

from __future__ import annotations

import random
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

# About 800,000 tokens, more than the default run reads.
MAX_CHARACTERS = 3_000_000
PASSAGE_TOKENS = 700
HELD_OUT_SHARE = 0.05


@dataclass(frozen=True)
class Corpus:
    source: str
    train: str
    held_out: str


@dataclass(frozen=True)
class Passage:
    """A piece of the held-out text: its tokens, and where in ``text`` each one stands."""

    text: str
    ids: list[int]
    spans: list[tuple[int, int]]


def read_corpus(path: Path | None) -> Corpus:
    """Text of a file or of every UTF-8 file under a folder; without a path, Python's own standard library."""
    if path is None:
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        source = "Python's standard library"
    else:
        files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
        source = str(path)
    random.Random(0).shuffle(files)
    texts = list(_readable(files))
    if not texts:
        raise ValueError(f"no UTF-8 text found in {source}; name a file or a folder with --text")
    train, held_out = _split(texts)
    return Corpus(source, train, held_out)


def _readable(files: list[Path]) -> Iterator[str]:
    characters = 0
    for file in files:
        try:
            text = file.read_text(encoding="utf-8").expandtabs(4)
        except (UnicodeDecodeError, OSError):
            continue
        if text.strip() and characters < MAX_CHARACTERS:
            characters += len(text)
            yield text[:MAX_CHARACTERS]


def _split(texts: list[str]) -> tuple[str, str]:
    """Whole files are held out, so that no neighbour of the passage was trained on; of a single file, its end."""
    if len(texts) == 1:
        cut = int(len(texts[0]) * (1 - HELD_OUT_SHARE))
        return texts[0][:cut], texts[0][cut:]
    wanted = HELD_OUT_SHARE * sum(map(len, texts))
    held_out = [texts.pop()]
    while len(texts) > 1 and sum(map(len, held_out)) < wanted:
        held_out.append(texts.pop())
    return "\n".join(texts), "\n".join(held_out)


def train_tokenizer(text: str, vocab_size: int) -> Tokenizer:
    """A byte-level BPE tokenizer, made from (at most) the first two million characters in a few seconds."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(vocab_size=vocab_size, show_progress=False, initial_alphabet=ByteLevel.alphabet())
    pieces = (text[i : i + 10_000] for i in range(0, min(len(text), 2_000_000), 10_000))
    tokenizer.train_from_iterator(pieces, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, text: str) -> torch.Tensor:
    """Token ids ``[N]`` of a long text; pieces keep the tokenizer's memory small."""
    pieces = [text[i : i + 100_000] for i in range(0, len(text), 100_000)]
    return torch.tensor([i for piece in tokenizer.encode_batch(pieces, add_special_tokens=False) for i in piece.ids])


def batches(tokens: torch.Tensor, batch: int, length: int, seed: int) -> Iterator[torch.Tensor]:
    """Endless random windows ``[batch, length]`` of the token stream, the same ones for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(tokens) - length + 1, (batch,), generator=generator)
        yield tokens[starts[:, None] + torch.arange(length)]


def choose_passage(tokenizer: Tokenizer, held_out: str) -> Passage:
    """The held-out text from its first top-level definition on, else from its first paragraph."""
    start = max(held_out.find("\ndef "), held_out.find("\n\n")) + 1
    text = held_out[start : start + 10 * PASSAGE_TOKENS].lstrip("\n")
    encoding = tokenizer.encode(text, add_special_tokens=False)
    ids, spans = encoding.ids[:PASSAGE_TOKENS], encoding.offsets[:PASSAGE_TOKENS]
    return Passage(text, ids, spans)
