"""The models that the demo can train."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, LlamaConfig, PretrainedConfig, PreTrainedModel

from .text import train_tokenizer

# tiny learns in about two minutes on two cores; small has ten times the parameters and is meant for a GPU.
PRESETS: dict[str, dict[str, Any]] = {
    "tiny": dict(hidden_size=192, intermediate_size=512, num_hidden_layers=4, num_attention_heads=6, vocab_size=4096),
    "small": dict(hidden_size=512, intermediate_size=1408, num_hidden_layers=6, num_attention_heads=8, vocab_size=8192),
}


class ModelSource:
    """A tokenizer, and a model that is the same each time it is made."""

    def __init__(self, name: str, text: str) -> None:
        self.pretrained = Path(name) if (Path(name) / "config.json").is_file() else None
        if self.pretrained:
            self.config = _read_config(self.pretrained / "config.json")
            self.tokenizer = _read_tokenizer(self.pretrained)
        else:
            self.config = _preset(name) if name in PRESETS else _read_config(Path(name))
            self.tokenizer = train_tokenizer(text, self.config.get_text_config().vocab_size)
            # A short text has fewer merges than asked for.
            self.config.get_text_config().vocab_size = self.tokenizer.get_vocab_size()
        self.vocab_size: int = self.config.get_text_config().vocab_size
        self.longest: int | None = getattr(self.config.get_text_config(), "max_position_embeddings", None)

    def make(self, seed: int, device: str) -> PreTrainedModel:
        torch.manual_seed(seed)
        if self.pretrained:
            model = AutoModelForCausalLM.from_pretrained(self.pretrained, local_files_only=True, dtype=torch.float32)
        else:
            model = AutoModelForCausalLM.from_config(self.config)
        return model.to(device)  # pyright: ignore[reportArgumentType]: transformers wraps it without its types


def _preset(name: str) -> PretrainedConfig:
    # So narrow a model learns twice as fast from 0.08 as from the usual 0.02; the tokenizer has no special tokens.
    return LlamaConfig(
        **PRESETS[name], tie_word_embeddings=True, initializer_range=0.08, bos_token_id=None, eos_token_id=None
    )


def _read_config(path: Path) -> PretrainedConfig:
    if not path.is_file():
        raise ValueError(f"--model is none of {', '.join(PRESETS)}, no config file and no model folder: {path}")
    try:
        values = json.loads(path.read_text())
        return CONFIG_MAPPING[values["model_type"]].from_dict(values)
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"--model: {path} is no Hugging Face model config ({error!r})") from error


def _read_tokenizer(folder: Path) -> Tokenizer:
    if not (folder / "tokenizer.json").is_file():
        raise ValueError(f"--model: {folder} has no tokenizer.json")
    return Tokenizer.from_file(str(folder / "tokenizer.json"))
