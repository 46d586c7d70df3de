"""One run of the demo: text, model, training with and without the patch, and what the picture tells of it."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import PreTrainedModel

from ..planner import choose_backend, chunk_columns
from .model import ModelSource
from .picture import Story
from .report import LogitsMemory, Run
from .text import batches, choose_passage, encode, read_corpus
from .training import History, Objective, held_out_means, token_entropies, train

SEED = 0
HELD_OUT_BATCHES = 8


class Experiment:
    """What both runs share: the text, the source of the model, the batches."""

    def __init__(self, options: argparse.Namespace, console: Console) -> None:
        self.options, self.console = options, console
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.corpus = read_corpus(options.text)
        self.source = ModelSource(options.model, self.corpus.train)
        self.length = min(options.length, self.source.longest or options.length)
        self.tokens = self._encode("training", self.corpus.train)
        held_out = batches(self._encode("held-out", self.corpus.held_out), options.batch, self.length, SEED)
        self.held_out = list(itertools.islice(held_out, HELD_OUT_BATCHES))

    def _encode(self, name: str, text: str) -> torch.Tensor:
        tokens = encode(self.source.tokenizer, text)
        if len(tokens) < self.length:
            reason = f"{len(tokens)} {name} tokens are fewer than the {self.length} of a sequence"
            raise ValueError(f"{self.corpus.source} is too short: {reason}; see --text and --length")
        return tokens

    def description(self) -> str:
        parameters = sum(p.numel() for p in self.source.make(SEED, "cpu").parameters())
        return (
            f"{self.source.config.model_type}, {parameters / 1e6:.1f} million parameters, "
            f"{self.source.vocab_size} classes, trained on {self.corpus.source} ({self.device})"
        )

    def run(
        self, name: str, make_objective: Callable[[PreTrainedModel, float], Callable[[torch.Tensor], Objective]]
    ) -> tuple[Run, PreTrainedModel]:
        """Train from the same seed and batches as every other call."""
        options, model = self.options, self.source.make(SEED, self.device)
        objective = make_objective(model, options.entropy_coef)
        data = batches(self.tokens, options.batch, self.length, SEED)
        with _progress(self.console) as progress:
            task = progress.add_task(name, total=options.steps, figures="")

            def on_step(history: History) -> None:
                figures = f"cross-entropy {history.cross_entropy[-1]:.3f}  entropy {history.entropy[-1]:.3f}"
                progress.update(task, advance=1, figures=figures)

            history = train(model, objective, data, options.steps, options.entropy_coef, on_step)
        return Run(history, *held_out_means(model, objective, self.held_out, options.entropy_coef)), model

    def logits_memory(self) -> LogitsMemory:
        """What the library's own planner says of a training step; the last token of a sequence predicts nothing."""
        batch, vocab = self.options.batch, self.source.vocab_size
        backend = choose_backend("auto", torch.device(self.device), torch.float32)
        kept = batch * (self.length - 1)
        return LogitsMemory(batch * self.length, vocab, kept, chunk_columns(kept, vocab, backend, "auto"))

    def story(self, model: PreTrainedModel, patched: Run, plain: Run | None) -> Story:
        passage = choose_passage(self.source.tokenizer, self.corpus.held_out)
        entropies = token_entropies(model, passage.ids, self.length)
        return Story(
            title=f"{self.description()}, entropy coefficient {self.options.entropy_coef:g}",
            vocab_size=self.source.vocab_size,
            patched=patched.history,
            plain=plain.history if plain else None,
            passage=passage,
            entropies=entropies,
        )


def _progress(console: Console) -> Progress:
    figures = TextColumn("{task.fields[figures]}")
    return Progress(
        TextColumn("{task.description:9}"),
        BarColumn(),
        MofNCompleteColumn(),
        figures,
        TimeRemainingColumn(),
        console=console,
    )
