"""Tiny models of real families, each with a way of its own from hidden states to the loss."""

from __future__ import annotations

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    MixtralConfig,
    PreTrainedModel,
    Qwen3Config,
)

from .data import LENGTH, VOCABULARY

_TOKENS = dict(vocab_size=VOCABULARY, bos_token_id=None, eos_token_id=None, pad_token_id=None)
_SHAPE = dict(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=64, attention_dropout=0.0, tie_word_embeddings=False, **_TOKENS,
)  # fmt: skip

_GPT2_SHAPE = dict(n_embd=64, n_layer=2, n_head=4, n_positions=LENGTH, tie_word_embeddings=True, **_TOKENS)

CONFIGS = {
    "llama": LlamaConfig(**_SHAPE),
    "qwen3": Qwen3Config(**_SHAPE, head_dim=16),
    # A cap of 5 bends logits that reach 4 after training; the usual 30 would do nothing here.
    "gemma2": Gemma2Config(
        **{**_SHAPE, "tie_word_embeddings": True}, head_dim=16, query_pre_attn_scalar=16, final_logit_softcapping=5.0
    ),
    "granite": GraniteConfig(
        **_SHAPE, logits_scaling=4.0, embedding_multiplier=6.0, residual_multiplier=0.5, attention_multiplier=0.125
    ),
    "mixtral": MixtralConfig(
        **_SHAPE, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True, router_aux_loss_coef=0.02
    ),
    "gpt2": GPT2Config(**_GPT2_SHAPE, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
}


def build(name: str) -> PreTrainedModel:
    """The model in fp32 on the CPU, the same weights at every call."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[name], attn_implementation="eager")
