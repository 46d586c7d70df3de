"""transformers.Trainer and accelerate with a patched model give what they give with an unpatched one."""

import copy

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from comparison import assert_close, batch, train
from families import tiny_model
from transformers import Trainer, TrainingArguments

from liger_entropy.huggingface import apply_liger_entropy

INPUTS = batch()


def dataset(size):
    """Rows with 3 to 13 labels, in no order of length."""
    generator = torch.Generator().manual_seed(3)
    rows = torch.randint(4, 97, (size, 16), generator=generator)
    labels = rows.clone()
    for index in range(size):
        labels[index, : 2 + 5 * index % 11] = -100
    return [{"input_ids": row, "labels": label} for row, label in zip(rows, labels, strict=True)]


def trained(folder, patched, wrap=lambda model: model, **arguments):
    model = tiny_model("llama")
    if patched:
        apply_liger_entropy(model)
    arguments = dict(
        output_dir=str(folder / str(patched)), use_cpu=True, per_device_train_batch_size=2, max_steps=2,
        logging_steps=1,
        gradient_accumulation_steps=4, learning_rate=1e-2, report_to=[], save_strategy="no", disable_tqdm=True, seed=0,
    ) | arguments  # fmt: skip
    trainer = Trainer(
        wrap(model), TrainingArguments(**arguments), train_dataset=dataset(16), eval_dataset=dataset(6),
        compute_metrics=_accuracy,
    )  # fmt: skip
    trainer.train()
    return trainer


def _accuracy(prediction):
    logits, labels = prediction
    assert isinstance(logits, np.ndarray) and logits.shape == (6, 16, 97)
    kept = labels[:, 1:] != -100
    return {"accuracy": float((logits[:, :-1].argmax(-1) == labels[:, 1:])[kept].mean())}


def losses(trainer):
    return torch.tensor([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])


def _lora(model):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], r=4, modules_to_save=["lm_head"]))


@pytest.mark.parametrize("wrap", [lambda model: model, _lora], ids=["model", "peft"])
def test_accumulated_steps_are_the_same(tmp_path, wrap):
    """PAT-02, PAT-06: uneven label counts over 4 micro-batches; then evaluate with metrics on the logits."""
    plain, patched = (trained(tmp_path, p, wrap) for p in (False, True))
    assert patched.model_accepts_loss_kwargs == plain.model_accepts_loss_kwargs is True
    assert len(losses(plain)) == 2
    assert_close(losses(patched), losses(plain))
    for (name, a), b in zip(plain.model.named_parameters(), patched.model.parameters(), strict=True):
        # Adam divides by the gradient's size: where that is rounding noise the update is noise too.
        assert (a - b).abs().max() < 1e-4, name
    results = [trainer.evaluate() for trainer in (plain, patched)]
    assert abs(results[0]["eval_loss"] - results[1]["eval_loss"]) < 1e-4
    assert results[0]["eval_accuracy"] == results[1]["eval_accuracy"]
    assert results[0].keys() == results[1].keys()


def test_label_smoothing_of_the_trainer_needs_logits_in_training(tmp_path):
    """PAT-25."""
    plain, patched = (trained(tmp_path, p, label_smoothing_factor=0.1, max_steps=1) for p in (False, True))
    assert_close(losses(patched), losses(plain))


def test_model_survives_prepare_and_unwrap():
    """PAT-28: mixed precision wraps forward, rebuilds its outputs, and unwrapping binds it again."""
    AcceleratorState._reset_state(True)  # the Trainer's is not in mixed precision
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = accelerator.prepare_model(apply_liger_entropy(tiny_model("llama"), token_statistics=True))
    reference = apply_liger_entropy(tiny_model("llama"), token_statistics=True)
    for unwrapped in (False, True):
        if unwrapped:
            model = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            expected, got = train(reference, INPUTS), train(model, INPUTS)
        assert_close(got.loss, expected.loss)
        assert got.outputs.logits is None
        assert_close(got.outputs.entropy_loss.detach(), expected.outputs.entropy_loss.detach())
        assert got.outputs.token_entropy.shape == INPUTS["labels"].shape
    assert copy.deepcopy(model)(**INPUTS).logits is None
