"""PEFT around the patch and the patch around PEFT."""

import pytest
import torch
from comparison import assert_same_run, batch, train
from families import tiny_model

from liger_entropy.huggingface import apply_liger_entropy, is_patched, remove_liger_entropy

peft = pytest.importorskip("peft")

INPUTS = batch()


def pair(config, first: str, **options):
    """Unpatched and patched, patched before or after PEFT, with the same adapter weights, none of them zero."""
    models = []
    for patched in (False, True):
        model = tiny_model("llama")
        if patched and first == "patch":
            apply_liger_entropy(model, **options)
        torch.manual_seed(0)
        model = peft.get_peft_model(model, config)
        torch.manual_seed(1)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data += 0.3 * torch.randn_like(parameter)
        if patched and first == "peft":
            apply_liger_entropy(model, **options)
        models.append(model)
    assert is_patched(models[1])
    return models


def noted(model) -> set:
    return model.get_base_model()._liger_entropy.noted


FIRST = pytest.mark.parametrize("first", ["patch", "peft"])


@FIRST
def test_lora_on_the_body_is_fused(first):
    plain, model = pair(peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=4), first)
    got = train(model, INPUTS)
    assert_same_run(got, train(plain, INPUTS))
    assert got.outputs.logits is None and not noted(model)
    assert got.outputs.entropy_loss > 0


@FIRST
@pytest.mark.filterwarnings("ignore:.*not fused")
def test_lora_on_the_head_is_right(first):
    """The wrapper's .weight is the frozen base alone: fusing with it would drop the adapter."""
    plain, model = pair(peft.LoraConfig(target_modules=["q_proj", "lm_head"], r=4), first, entropy_coef=0.0)
    got = train(model, INPUTS)
    assert_same_run(got, train(plain, INPUTS))
    assert any("lm_head" in name for name in got.gradients) and noted(model)
    assert got.outputs.entropy_loss > 0


@FIRST
def test_modules_to_save_trains_the_copy(first):
    """PAT-17: the active copy, the original under disable_adapter."""
    plain, model = pair(peft.LoraConfig(target_modules=["q_proj"], r=4, modules_to_save=["lm_head"]), first)
    got = train(model, INPUTS)
    assert_same_run(got, train(plain, INPUTS))
    assert [n for n in got.gradients if "lm_head" in n] == ["base_model.model.lm_head.modules_to_save.default.weight"]
    assert got.outputs.logits is None and not noted(model)
    with plain.disable_adapter(), model.disable_adapter():
        base = model(**INPUTS).loss
        assert torch.allclose(base, plain(**INPUTS).loss)
    assert (base - got.loss).abs() > 1e-2


@FIRST
def test_switching_adapters_switches_the_loss(first):
    """PAT-19: nothing is cached at patch time."""
    plain, model = pair(peft.LoraConfig(target_modules=["q_proj"], r=4, modules_to_save=["lm_head"]), first)
    for m in (plain, model):
        torch.manual_seed(5)
        m.add_adapter("other", peft.LoraConfig(target_modules=["v_proj"], r=4, modules_to_save=["lm_head"]))
        for name, parameter in m.named_parameters():
            if ".other." in name:
                parameter.data += 0.1 * torch.randn_like(parameter)
    losses = []
    for name in ("default", "other", "default"):
        plain.set_adapter(name), model.set_adapter(name)
        got = train(model, INPUTS)
        assert_same_run(got, train(plain, INPUTS))
        losses.append(got.loss.item())
    assert losses[0] == losses[2] != losses[1]


@FIRST
def test_prompt_tuning_pads_its_labels(first):
    """PAT-18: five virtual tokens in front."""
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)
    plain, model = pair(config, first)
    inputs = {**INPUTS, "attention_mask": torch.ones_like(INPUTS["input_ids"])}
    got = train(model, inputs)
    assert_same_run(got, train(plain, inputs))
    assert list(got.gradients) == ["prompt_encoder.default.embedding.weight"]
    assert got.outputs.logits is None


def test_merge_and_remove_leave_an_ordinary_model():
    plain, model = pair(peft.LoraConfig(target_modules=["q_proj"], r=4), "patch")
    plain, model = plain.merge_and_unload().requires_grad_(True), model.merge_and_unload().requires_grad_(True)
    assert_same_run(train(model, INPUTS), train(plain, INPUTS))
    assert not is_patched(remove_liger_entropy(model))
