"""Tiny models of every causal language model in transformers, built from their configurations without a download."""

from __future__ import annotations

import inspect
from typing import Any

import releases
import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto import modeling_auto

VOCABULARY = 97

# Any of these that a configuration knows is set; the names are those that families share.
SHRINK: dict[str, Any] = dict(
    vocab_size=VOCABULARY, text_vocab_size=VOCABULARY, n_words=VOCABULARY, num_embeddings=VOCABULARY,
    hidden_size=32, d_model=32, n_embd=32, dim=32, emb_dim=32, n_embed=32, embedding_size=32, embed_dim=32,
    word_embed_proj_dim=32,
    intermediate_size=64, ffn_dim=64, d_ff=64, n_inner=64, d_inner=64, ffn_hidden_size=64, dff=64, feed_forward_size=64,
    encoder_ffn_dim=64, decoder_ffn_dim=64, mlp_hidden_size=64, moe_intermediate_size=16, dim_ff=64,
    expert_ffn_hidden_size=16,
    shared_expert_intermediate_size=16, moe_shared_expert_intermediate_size=16, attention_hidden_size=32,
    intermediate_size_mlp=64, block_ff_dim=64, shared_intermediate_size=32, num_hidden_layers=2, n_layer=2,
    n_layers=2, num_layers=2, encoder_layers=2, decoder_layers=2, num_encoder_layers=2, num_decoder_layers=2,
    num_attention_heads=4, n_head=4, n_heads=4, num_heads=4, encoder_attention_heads=4, decoder_attention_heads=4,
    num_encoder_attention_heads=4, num_decoder_attention_heads=4,
    num_key_value_heads=2, head_dim=8, dim_head=8, max_position_embeddings=64, n_positions=64, n_ctx=64, max_seq_len=64,
    num_experts=4, num_local_experts=4, n_routed_experts=4, moe_num_experts=4, num_experts_per_tok=2,
    n_shared_experts=1,
    n_group=1, topk_group=1, first_k_dense_replace=1, kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=4,
    qk_nope_head_dim=4,
    v_head_dim=8, mamba_d_state=8, mamba_d_conv=2, mamba_n_heads=8, mamba_d_head=8, mamba_n_groups=1, mamba_expand=2,
    state_size=8, conv_kernel=2, time_step_rank=4, pad_token_id=0, bos_token_id=1, eos_token_id=2, sep_token_id=2,
    decoder_start_token_id=1, index_topk=4, index_n_heads=2, index_head_dim=8,
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8,
    hidden_size_per_layer_input=8, vocab_size_per_layer_input=VOCABULARY, attention_dropout=0.0,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, dropout=0.0,
    activation_dropout=0.0,
)  # fmt: skip

_ALL_HEADS = dict(num_key_value_heads=4)
_INDEXED = dict(
    layer_types=["linear_attention", "full_attention"], hc_lowrank=8, ple_embed_dim=32, indexer_n_heads=2,
    indexer_kv_heads=1, indexer_head_dim=8, indexer_budget=8, indexer_compress_ratio=2,
)  # fmt: skip
_ZAMBA = ["linear_attention", "hybrid", "linear_attention", "hybrid"]
_LINEAR_THEN_FULL = dict(layer_types=["linear_attention", "full_attention"])


def _text(model_type: str, **extra: Any) -> dict[str, Any]:
    if model_type not in CONFIG_MAPPING:  # an older release, which lacks the family that embeds it too
        return {}
    return {"model_type": model_type, **shrunk(CONFIG_MAPPING[model_type]), **extra}


_SIGLIP = dict(
    model_type="siglip_vision_model", hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
    image_size=16, patch_size=8,
)  # fmt: skip


def _families() -> dict[str, dict[str, Any]]:
    """What the shared names do not shrink, or what they break."""
    return dict(
        axk2=_ALL_HEADS,
        bailing_hybrid=dict(layer_types=["linear_attention", "full_attention"], linear_num_heads=4, linear_head_dim=8),
        bamba=dict(attn_layer_indices=[1]),
        blt=dict(
            encoder_hash_byte_group_size=[2, 3], encoder_hash_byte_group_vocab=50, vocab_size=260,
            **{name: dict(hidden_size=32, num_attention_heads=4, num_key_value_heads=4, num_hidden_layers=1,
                          intermediate_size=32, vocab_size=260, hidden_size_global=32, hidden_size_local=32)
               for name in ("patcher_config", "encoder_config", "decoder_config", "global_config")},
        ),
        codegen=dict(rotary_dim=4),
        cohere_compass_text=dict(layer_types=["full_attention", "full_attention"],
                                 rope_parameters=dict(full_attention=dict(rope_type="default", rope_theta=1e4,
                                                                           mrope_section=[1, 1, 2]))),
        dbrx=dict(attn_config=dict(kv_n_heads=2, clip_qkv=8.0, rope_theta=10000.0)),
        deepseek_v32=_ALL_HEADS,
        dots3_note_text=_ALL_HEADS,
        ernie4_5_moe=dict(moe_k=2),
        falcon_h1=dict(mamba_d_ssm=64),
        fuyu=dict(text_config=_text("persimmon"), patch_size=4, image_size=8, hidden_size=32),
        gemma3=dict(text_config=_text("gemma3_text"), vision_config=_SIGLIP, image_token_index=3,
                    mm_tokens_per_image=4),
        gemma3n_text=dict(num_kv_shared_layers=0, layer_types=["sliding_attention", "full_attention"], laurel_rank=4,
                          intermediate_size=[64, 64], activation_sparsity_pattern=[0.0, 0.0]),
        gemma4_assistant=dict(text_config=_text("gemma4_text", hidden_size_per_layer_input=0), backbone_hidden_size=32),
        gemma4_unified_assistant=dict(text_config=_text("gemma4_unified_text"), backbone_hidden_size=32),
        glm_moe_dsa=_ALL_HEADS,
        got_ocr2=dict(text_config=_text("qwen2"), image_token_index=3),
        gpt_neo=dict(attention_types=[[["global", "local"], 1]], window_size=4),
        gptj=dict(rotary_dim=4),
        granitemoehybrid=dict(layer_types=["mamba", "attention"]),
        inkling2_loop_text=dict(loop_layer_index_start=1, loop_layer_index_end=2, loop_num_passes=2,
                                n_layers_per_attn_res_block=1, num_hidden_layers=3, swa_num_attention_heads=4,
                                swa_num_key_value_heads=2, swa_head_dim=8, vocab_size=101, unpadded_vocab_size=97,
                                layer_types=["hybrid_sliding", "hybrid", "hybrid"]),
        inkling2_text=dict(vocab_size=101, unpadded_vocab_size=97, swa_num_attention_heads=4,
                           swa_num_key_value_heads=2, swa_head_dim=8),
        jamba=dict(attn_layer_period=2, attn_layer_offset=1, mamba_dt_rank=4),
        kimi_linear=dict(layer_types=["linear_attention", "full_attention"], linear_num_heads=4, linear_head_dim=8),
        lfm2_moe=dict(layer_types=["conv", "full_attention"], num_dense_layers=1),
        lfm3=dict(layer_types=["conv", "full_attention"]),
        longcat_flash=dict(head_dim=4),
        mamba2=dict(num_heads=8, head_dim=8),
        git=dict(vision_config=dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
                                    image_size=16, patch_size=8)),
        moshi=dict(audio_vocab_size=16, ffn_dim=64, num_codebooks=2),
        moss_transcribe_diarize=dict(text_config=_text("qwen3"), audio_token_id=3),
        mpt=dict(attn_config=dict(attn_pdrop=0), resid_pdrop=0),
        nemotron_h=dict(mamba_num_heads=8, mamba_head_dim=8, n_groups=1, ssm_state_size=8, chunk_size=8),
        qwen3_5=dict(text_config=_text("qwen3_5_text", **_LINEAR_THEN_FULL)),
        qwen3_5_moe=dict(text_config=_text("qwen3_5_moe_text", **_LINEAR_THEN_FULL)),
        qwen3_5_moe_text=_LINEAR_THEN_FULL,
        qwen3_5_text=_LINEAR_THEN_FULL,
        qwen3_next=_LINEAR_THEN_FULL,
        qwen4_exp_text=dict(**_INDEXED),
        qwen4_exp=dict(text_config=_text("qwen4_exp_text", **_INDEXED)),
        recurrent_gemma=dict(block_types=["recurrent", "attention"], lru_width=32, attention_window_size=16),
        reformer=dict(is_decoder=True, hash_seed=0, local_attention_probs_dropout_prob=0.0, axial_pos_shape=(4, 4),
                      axial_pos_embds_dim=(16, 16), attention_head_size=8, attn_layers=("local", "lsh"),
                      local_attn_chunk_length=8, lsh_attn_chunk_length=8, num_buckets=2),
        roc_bert=dict(pronunciation_vocab_size=20, shape_vocab_size=20, pronunciation_embed_dim=8, shape_embed_dim=8),
                xmod=dict(default_language="en_XX"),
        zamba=dict(layers_block_type=_ZAMBA, layer_types=_ZAMBA, num_hidden_layers=4,
                   attention_hidden_size=64, attention_head_dim=16, num_key_value_heads=4, n_mamba_heads=2,
                   mamba_dt_rank=4),
        zamba2=dict(layers_block_type=["linear_attention", "hybrid"], layer_types=["linear_attention", "hybrid"],
                    attention_head_dim=16, mamba_ngroups=1, n_mamba_heads=8, mamba_headdim=8, hybrid_layer_ids=[1],
                    adapter_rank=4, num_query_groups=4, kv_channels=8, chunk_size=8),
        zaya=dict(num_experts_per_tok=1),
    )  # fmt: skip


_DRAFTER = "a drafter that runs on another model's hidden states and key-value cache; its forward takes no labels"
NOT_BUILDABLE = {
    "dots3_note": "its composite configuration fixes settings of layers 25 to 41; dots3_note_text is the same class",
    "gemma3n": "its vision tower comes from timm, which is not installed",
    "gemma4_assistant": _DRAFTER,
    "gemma4_unified_assistant": _DRAFTER,
    "xlstm": "its plain-torch kernels edit in place what their backward needs, so the unpatched model does not train",
    "musicgen": "AutoModelForCausalLM hands the decoder its composite configuration, which lacks the decoder's fields",
    "musicgen_melody": "AutoModelForCausalLM hands the decoder its composite configuration, as for musicgen",
    **releases.NOT_BUILDABLE,
}
# Part of the warning. dory's head scales its input; prophetnet takes nll_loss of its own log_softmax.
MATERIALISED = {"dory": "has a forward of its own", "prophetnet": "log_softmax", **releases.MATERIALISED}
WITHOUT_ENTROPY = {"prophetnet", "xlm-prophetnet"}


def names() -> dict[str, str]:
    """model type -> class name."""
    return dict(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_config(model_type: str, **extra: Any) -> Any:
    config_class = CONFIG_MAPPING[model_type]
    return config_class(**{**shrunk(config_class), **_family(model_type), **extra})


def _family(model_type: str) -> dict[str, Any]:
    return releases.FAMILIES[model_type] if model_type in releases.FAMILIES else _families().get(model_type, {})


def shrunk(config_class: type) -> dict[str, Any]:
    known = set(inspect.signature(config_class.__init__).parameters)
    known |= {name for base in config_class.__mro__ for name in getattr(base, "__annotations__", {})}
    overrides = {name: value for name, value in SHRINK.items() if name in known}
    for name, sub in getattr(config_class, "sub_configs", {}).items():
        if name != "auto" and hasattr(sub, "__mro__") and sub.__name__ != "AutoConfig":
            overrides[name] = shrunk(sub)
    return overrides


def tiny_model(model_type: str, **extra: Any) -> nn.Module:
    """In training mode, without dropout, with the same weights at every call."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(model_type, **extra))
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.float().train()


def inputs_for(model_type: str) -> dict[str, Any]:
    """Inputs beside input_ids and labels."""
    if model_type == "git":
        return {"pixel_values": torch.ones(2, 3, 16, 16)}
    if model_type == "blt":  # its cache asks BltConfig for num_hidden_layers, which it does not have
        return {"use_cache": False}
    return {}
