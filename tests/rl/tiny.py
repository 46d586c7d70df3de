"""A tokenizer trained on the spot, tiny models from configs, and a data set, for the trainers."""

import functools

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GraniteConfig,
    LlamaConfig,
    MixtralConfig,
    PreTrainedTokenizerFast,
    RecurrentGemmaConfig,
)

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight"]
PROMPTS = [f"{a} and {b} is" for a in WORDS for b in WORDS[:2]]


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    base = Tokenizer(models.BPE())
    base.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    base.decoder = decoders.ByteLevel()
    special = ["<pad>", "<eos>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    base.train_from_iterator(
        PROMPTS, trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet)
    )
    return PreTrainedTokenizerFast(tokenizer_object=base, pad_token="<pad>", eos_token="<eos>", padding_side="left")


SHAPE = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
    head_dim=16, max_position_embeddings=64, pad_token_id=0, eos_token_id=1, bos_token_id=1,
)  # fmt: skip
CONFIGS = {
    "llama": (LlamaConfig, {}),
    "granite": (GraniteConfig, dict(logits_scaling=4.0)),
    "gemma2": (Gemma2Config, dict(final_logit_softcapping=2.0)),
    "mixtral": (MixtralConfig, dict(num_local_experts=4, router_aux_loss_coef=0.1, output_router_logits=True)),
    "recurrent_gemma": (
        RecurrentGemmaConfig,
        dict(logits_soft_cap=2.0, block_types=["recurrent", "attention"], lru_width=32, num_hidden_layers=2),
    ),
}


def model(family: str = "llama", vocab_size: int | None = None, scale: float = 4.0, **changes):
    """Weights large enough for logits that differ, the same in every call."""
    torch.manual_seed(1)
    kind, options = CONFIGS[family]
    config = kind(vocab_size=vocab_size or len(tokenizer()), **{**SHAPE, **options, **changes})
    tiny = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in tiny.parameters():
            if parameter.ndim > 1:
                parameter.mul_(scale)
    return tiny


def prompts() -> Dataset:
    return Dataset.from_dict({"prompt": PROMPTS})


def texts() -> Dataset:
    return Dataset.from_dict({"prompt": PROMPTS, "completion": [" " + WORDS[len(p) % 8] for p in PROMPTS]})


def length_reward(completions, **kwargs) -> list[float]:
    """Differs between the completions of one prompt, so that there are advantages."""
    return [float(len(set(text))) for text in completions]
