"""transformers.Trainer and accelerate with a patched model give what they give with an unpatched one."""

import copy
from itertools import pairwise

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from comparison import assert_close, batch, entropy, train
from families import tiny_model
from transformers import Trainer, TrainerCallback, TrainingArguments

from liger_entropy.huggingface import EntropyCallback, apply_liger_entropy

INPUTS = batch()
ACCUMULATION, STEPS = 4, 2
ARGUMENTS = dict(
    use_cpu=True, per_device_train_batch_size=2, max_steps=STEPS, gradient_accumulation_steps=ACCUMULATION, seed=0,
    # Unlike Adam, which divides by the size of a gradient, SGD keeps rounding noise as small as it is.
    optim="sgd", learning_rate=1.0, logging_steps=1, report_to=[], save_strategy="no", disable_tqdm=True,
)  # fmt: skip


def dataset(size):
    """Rows with 3 to 13 labels, in no order of length."""
    generator = torch.Generator().manual_seed(3)
    rows = torch.randint(4, 97, (size, 16), generator=generator)
    labels = rows.clone()
    for index in range(size):
        labels[index, : 2 + 5 * index % 11] = -100
    return [{"input_ids": row, "labels": label} for row, label in zip(rows, labels, strict=True)]


def peaked_model():
    """Its entropies differ from token to token, unlike those of a model as it is initialised."""
    model = tiny_model("llama")
    with torch.no_grad():
        model.lm_head.weight.mul_(30)
    return model


def trainer_for(folder, patched, wrap=lambda model: model, callbacks=(), **arguments):
    model = peaked_model()
    if patched:
        apply_liger_entropy(model)
        callbacks = (*callbacks, EntropyCallback())
    AcceleratorState._reset_state(True)  # the mixed precision of an earlier test
    return Trainer(
        wrap(model), TrainingArguments(output_dir=str(folder / str(patched)), **(ARGUMENTS | arguments)),
        train_dataset=dataset(16), eval_dataset=dataset(6), compute_metrics=_accuracy, callbacks=list(callbacks),
    )  # fmt: skip


def trained(folder, patched, wrap=lambda model: model, resume=None, **arguments):
    trainer = trainer_for(folder, patched, wrap, **arguments)
    trainer.forwards = _watch(trainer.model)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def _watch(model):
    """For every forward in training: the entropies of its kept tokens, or nothing where there are no logits."""
    seen = []

    def watch(module, args, kwargs, outputs):
        if module.training:
            kept = kwargs["labels"][:, 1:] != -100 if "labels" in kwargs else None
            logits = outputs.logits
            seen.append(None if logits is None or kept is None else entropy(logits.detach().float())[:, :-1][kept])

    model.register_forward_hook(watch, with_kwargs=True)
    return seen


def _accuracy(prediction):
    logits, labels = prediction
    assert isinstance(logits, np.ndarray) and logits.shape == (6, 16, 97)
    kept = labels[:, 1:] != -100
    return {"accuracy": float((logits[:, :-1].argmax(-1) == labels[:, 1:])[kept].mean())}


def logged(trainer, key="loss"):
    return torch.tensor([entry[key] for entry in trainer.state.log_history if "loss" in entry])


def moves(trainer):
    """How far training took each parameter."""
    start = dict(peaked_model().named_parameters())
    ends = {name.removeprefix("base_model.model."): p for name, p in trainer.model.named_parameters()}
    return {name: (p - start[name] if name in start else p).detach() for name, p in ends.items()}


def assert_same_training(patched, plain):
    """The losses of the log, and how far every parameter moved."""
    assert_close(logged(patched), logged(plain), "losses")
    expected = moves(plain)
    largest = max(move.abs().max().item() for move in expected.values())
    assert largest > 0.1
    for name, move in moves(patched).items():
        assert_close(move, expected[name], name, scale=largest)


def assert_entropy_logged(patched, plain, steps_each=1):
    """The mean over the tokens of the micro-batches between two records, in as many forwards as the unpatched run."""
    starts = range(0, len(plain.forwards) + 1, steps_each * ACCUMULATION)
    expected = torch.stack([torch.cat(plain.forwards[a:b]).mean() for a, b in pairwise(starts)])
    assert_close(logged(patched, "entropy"), expected, "entropy")
    assert len(patched.forwards) == len(plain.forwards) and set(patched.forwards) == {None}
    assert all("entropy" not in entry for entry in patched.state.log_history if "loss" not in entry)
    assert all(m._liger_entropy.tally is None for m in patched.model.modules() if hasattr(m, "_liger_entropy"))


def _lora(model):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], r=4, modules_to_save=["lm_head"]))


@pytest.mark.parametrize("wrap", [lambda model: model, _lora], ids=["model", "peft"])
def test_accumulated_steps_are_the_same(tmp_path, wrap):
    """PAT-02, PAT-06: uneven label counts over 4 micro-batches; then evaluate with metrics on the logits."""
    plain, patched = (trained(tmp_path, p, wrap) for p in (False, True))
    assert patched.model_accepts_loss_kwargs == plain.model_accepts_loss_kwargs is True
    assert len(logged(plain)) == STEPS
    assert_same_training(patched, plain)
    assert_entropy_logged(patched, plain)
    results = [trainer.evaluate() for trainer in (plain, patched)]
    assert abs(results[0]["eval_loss"] - results[1]["eval_loss"]) < 1e-5 * results[0]["eval_loss"]
    assert results[0]["eval_accuracy"] == results[1]["eval_accuracy"]
    assert results[0].keys() == results[1].keys()


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
def test_gradient_checkpointing_counts_every_token_once(tmp_path):
    """It runs layers twice; and one record for two steps, evaluation between them left out of its entropy."""
    arguments = dict(gradient_checkpointing=True, logging_steps=2, eval_strategy="steps", eval_steps=1)
    plain, patched = (trained(tmp_path, p, **arguments) for p in (False, True))
    assert patched.model.is_gradient_checkpointing
    assert_same_training(patched, plain)
    assert_entropy_logged(patched, plain, steps_each=2)


def test_label_smoothing_of_the_trainer_needs_logits_in_training(tmp_path):
    """PAT-25; the model then makes no loss, so there is no entropy, and a warning says so."""
    plain = trained(tmp_path, False, label_smoothing_factor=0.1)
    with pytest.warns(UserWarning, match="no entropy to log"):
        patched = trained(tmp_path, True, label_smoothing_factor=0.1)
    assert_same_training(patched, plain)
    assert not any("entropy" in entry for entry in patched.state.log_history)


def test_resumed_run_is_the_uninterrupted_one(tmp_path):
    """Saved after the first step by a patched model, loaded by a new one: optimizer, data and log go on."""
    plain = trained(tmp_path, False)
    whole = trained(tmp_path, True, save_strategy="steps", save_steps=1)
    resumed = trained(tmp_path, True, resume=str(tmp_path / "True" / "checkpoint-1"))
    assert len(resumed.forwards) == ACCUMULATION
    assert_same_training(resumed, plain)
    assert torch.equal(logged(resumed, "entropy"), logged(whole, "entropy"))


def test_bf16_is_no_further_from_fp32_than_unpatched(tmp_path):
    """Both multiply in bf16. Plain torch also rounds its logits, so it bounds the distance."""
    truth = trained(tmp_path, False)
    plain, patched = (trained(tmp_path, p, bf16=True) for p in (False, True))
    exact = torch.cat([move.flatten() for move in moves(truth).values()])
    bound, error = (torch.cat([m.flatten() for m in moves(t).values()]) - exact for t in (plain, patched))
    assert bound.norm() > 1e-4 * exact.norm(), "not in bf16"
    assert error.norm() <= 1.1 * bound.norm()
    bound, error = (logged(t) - logged(truth) for t in (plain, patched))  # over the steps: one may be right by chance
    assert error.norm() <= 1.1 * bound.norm()
    entropies = torch.stack([torch.cat(truth.forwards[a : a + ACCUMULATION]).mean() for a in (0, ACCUMULATION)])
    assert (logged(patched, "entropy") / entropies - 1).abs().max() <= 2**-8  # the precision of bf16


class Reporter(TrainerCallback):
    """Stands for TensorBoard or W&B: it comes first."""

    def __init__(self):
        self.entropies = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.entropies += [logs["entropy"]] if "entropy" in logs else []


def test_attached_callback_reaches_the_reporters(tmp_path):
    reporters = Reporter(), Reporter()
    trainers = [trainer_for(tmp_path, True, callbacks=[r], max_steps=1) for r in reporters]
    trainers[1].remove_callback(EntropyCallback)
    EntropyCallback().attach(trainers[1])
    for trainer in trainers:
        trainer.train()
    assert not reporters[0].entropies and len(reporters[1].entropies) == 1
    assert reporters[1].entropies[0] == trainers[1].state.log_history[0]["entropy"]


def test_callback_says_who_goes_without_entropy(tmp_path):
    trainer = trainer_for(tmp_path, False, callbacks=[EntropyCallback()])
    with pytest.raises(ValueError, match="LlamaForCausalLM is not patched"):
        trainer.train()
    callback, model = EntropyCallback(), apply_liger_entropy(tiny_model("llama"))
    trainer.args.report_to = ["wandb"]
    with pytest.warns(UserWarning, match=r"wandb will not get the entropy.*attach"):
        callback.on_train_begin(trainer.args, trainer.state, trainer.control, model=model)


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
