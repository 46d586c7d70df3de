"""Vision-language models: images in front of the text, and what each does about their labels."""

import pytest
import releases
import torch
import transformers
from comparison import assert_like_unpatched, batch
from families import shrunk

IMAGE = 3  # the id that stands for an image position
VISION = dict(
    hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=8
)
QWEN_VISION = dict(
    depth=1, hidden_size=16, intermediate_size=32, num_heads=2, patch_size=4, out_hidden_size=32, spatial_merge_size=2,
    temporal_patch_size=2, num_position_embeddings=64,
)  # fmt: skip
ROPE = dict(rope_type="default", rope_theta=1e4, mrope_section=[1, 1, 2])


def text(model_type, **extra):
    return {"model_type": model_type, **shrunk(transformers.CONFIG_MAPPING[model_type]), **extra}


# (configuration, extra inputs); every image takes 4 positions.
MODELS = {
    "Qwen2_5_VLForConditionalGeneration": lambda: (
        transformers.Qwen2_5_VLConfig(
            text_config=text("qwen2_5_vl_text", **{releases.ROPE: ROPE}),
            vision_config=QWEN_VISION | dict(fullatt_block_indexes=[0]),
            image_token_id=IMAGE,
        ), _patches(),
    ),
    "Qwen3VLForConditionalGeneration": lambda: (
        transformers.Qwen3VLConfig(
            text_config=text("qwen3_vl_text", **{releases.ROPE: ROPE | dict(mrope_interleaved=True)}),
            vision_config=QWEN_VISION | dict(deepstack_visual_indexes=[0]), image_token_id=IMAGE,
        ), _patches(),
    ),
    "LlavaForConditionalGeneration": lambda: (
        transformers.LlavaConfig(
            text_config=text("llama"), vision_config=dict(model_type="clip_vision_model", **VISION),
            image_token_index=IMAGE,
            image_seq_length=4, vision_feature_layer=-1,
        ), dict(pixel_values=torch.ones(2, 3, 16, 16)),
    ),
    "Gemma3ForConditionalGeneration": lambda: (
        transformers.Gemma3Config(
            text_config=text("gemma3_text"), vision_config=dict(model_type="siglip_vision_model", **VISION),
            image_token_index=IMAGE, mm_tokens_per_image=4,
        ), dict(pixel_values=torch.ones(2, 3, 16, 16), token_type_ids=_types()),
    ),
    "PaliGemmaForConditionalGeneration": lambda: (
        transformers.PaliGemmaConfig(
            text_config=text("gemma"), vision_config=dict(model_type="siglip_vision_model", projection_dim=32,
                                                          **VISION),
            image_token_index=IMAGE, projection_dim=32, hidden_size=32,
        ), dict(pixel_values=torch.ones(2, 3, 16, 16), token_type_ids=1 - _types()),
    ),
}  # fmt: skip


def _patches():
    """Two images of 4 x 4 patches; 2 x 2 of them merge into a position."""
    generator = torch.Generator().manual_seed(4)
    pixels = torch.randn(2 * 16, 3 * 2 * 4 * 4, generator=generator)
    types = dict(mm_token_type_ids=_types())
    return dict(pixel_values=pixels, image_grid_thw=torch.tensor([[1, 4, 4]] * 2), **types)


def _types():
    types = torch.zeros(2, 16, dtype=torch.long)
    types[:, :4] = 1
    return types


@pytest.mark.parametrize("name", MODELS)
def test_vision_language_model_trains_as_unpatched(name):
    config, extra = MODELS[name]()
    torch.manual_seed(0)
    model = getattr(transformers, name)(config)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    inputs = batch()
    inputs["input_ids"][:, :4] = IMAGE
    inputs["labels"][:, :4] = -100
    assert_like_unpatched(model, {**inputs, "attention_mask": torch.ones(2, 16, dtype=torch.long), **extra})
    assert not model._liger_entropy.noted
