"""What transformers 4 needs of the tiny models' configurations that 5 does not."""

from typing import Any

import transformers

FOUR = int(transformers.__version__.split(".")[0]) == 4

# Configurations of version 5 call this rope_parameters.
ROPE = "rope_scaling" if FOUR else "rope_parameters"

_COMPOSITE = "AutoModelForCausalLM of transformers 4 hands the model its composite configuration, which it cannot read"

FAMILIES: dict[str, dict[str, Any]] = dict(
    jamba=dict(attn_layer_period=2, attn_layer_offset=1, mamba_dt_rank=4, use_mamba_kernels=False),
    mllama=dict(text_config=dict(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=97, cross_attention_layers=[], rope_scaling=dict(rope_type="default"), pad_token_id=0,
    )),
    zamba=dict(num_hidden_layers=4, attn_layer_period=2, attn_layer_offset=0, attention_hidden_size=64,
               attention_head_dim=16, num_key_value_heads=4, n_mamba_heads=2, mamba_dt_rank=4,
               use_mamba_kernels=False),
    zamba2=dict(layers_block_type=["mamba", "hybrid"], attention_head_dim=16, mamba_ngroups=1, n_mamba_heads=8,
                mamba_headdim=8, hybrid_layer_ids=[1], adapter_rank=4, num_query_groups=4, kv_channels=8,
                chunk_size=8),
    **{"open-llama": dict(shared_input_output_embedding=False)},
) if FOUR else {}  # fmt: skip
NOT_BUILDABLE: dict[str, str] = {
    "emu3": _COMPOSITE,
    "llama4": _COMPOSITE,
    "qdqbert": "it needs pytorch-quantization, which is not installed",
    "speech_to_text_2": "its initialisation looks for a weight that its position embedding does not have",
    "transfo-xl": "its adaptive softmax gives no logits beside a loss to compare with",
} if FOUR else {}  # fmt: skip
MATERIALISED: dict[str, str] = {"xlm-prophetnet": "log_softmax"} if FOUR else {}
