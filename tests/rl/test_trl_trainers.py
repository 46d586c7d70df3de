"""TRL's trainers as users run them, beside the same trainers without the patch."""

import contextlib
import warnings

import pytest
import tiny
import torch
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from liger_entropy.integrations import trl as integration
from liger_entropy.integrations.trl import EntropyTerm, apply_to_trl, remove_from_trl

# Adam divides by sqrt(v) + epsilon: with the default 1e-8 a gradient that is rounding noise moves a weight by the whole
# learning rate.
COMMON = dict(
    use_cpu=True, bf16=False, report_to=[], logging_steps=1, learning_rate=1e-2, lr_scheduler_type="constant", seed=5,
    save_strategy="no", disable_tqdm=True, adam_epsilon=1e-4, gradient_checkpointing=False,
)  # fmt: skip
GRPO = dict(
    **COMMON, per_device_train_batch_size=8, num_generations=4, max_completion_length=6, max_steps=3, temperature=0.8
)


@contextlib.contextmanager
def patched(use: bool):
    if use:
        apply_to_trl()
    try:
        yield
    finally:
        remove_from_trl()


class Recorded(GRPOTrainer):
    """Keeps the log-probs and entropies of every call."""

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        logps, entropies, aux = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        self.calls = [*getattr(self, "calls", []), (logps.detach(), None if entropies is None else entropies.detach())]
        return logps, entropies, aux


def run_grpo(tmp_path, use: bool, family="llama", peft_config=None, **options):
    model = tiny.model(family)
    if options.get("beta") and peft_config is None:  # the reference is loaded from where the model says it comes from
        model.save_pretrained(tmp_path / "model")
        model.config._name_or_path = str(tmp_path / "model")
    with patched(use), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = Recorded(
            model=model,
            reward_funcs=tiny.length_reward,
            args=GRPOConfig(output_dir=str(tmp_path / str(use)), **{**GRPO, **options}),
            train_dataset=tiny.prompts(),
            processing_class=tiny.tokenizer(),
            peft_config=peft_config,
        )
    trainer.train()
    return trainer


def run_sft(tmp_path, use: bool, trainer=SFTTrainer, family="llama", **options):
    arguments = {**COMMON, "per_device_train_batch_size": 4, "max_steps": 3, **options}
    with patched(use):
        trainer = trainer(
            model=tiny.model(family),
            args=SFTConfig(output_dir=str(tmp_path / str(use)), **arguments),
            train_dataset=tiny.texts(),
            eval_dataset=tiny.texts(),
            processing_class=tiny.tokenizer(),
        )
    trainer.train()
    return trainer


TIMES = ("runtime", "per_second", "step_time")


def check_same_training(ours, theirs, rtol=2e-4):
    """Every logged number of every step, and the weights at the end."""
    assert len(ours.state.log_history) >= 3
    for a, b in zip(ours.state.log_history, theirs.state.log_history, strict=True):
        a, b = ({k: v for k, v in entry.items() if not any(t in k for t in TIMES)} for entry in (a, b))
        assert a == pytest.approx(b, rel=rtol, abs=2e-6)
    for (name, p), q in zip(ours.model.named_parameters(), theirs.model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")


VARIANTS = {
    "plain": {},
    "bonus, two passes over each batch, KL to a reference": dict(entropy_coef=0.05, num_iterations=2, beta=0.04),
    "top 20 % of the tokens, accumulated": dict(top_entropy_quantile=0.2, gradient_accumulation_steps=2),
    "adaptive entropy": dict(use_adaptive_entropy=True, entropy_target=9.0, entropy_coef=0.01, entropy_coef_delta=0.01),
    "Granite's scale": dict(family="granite", entropy_coef=0.05),
    "Gemma's softcap, fp32 head": dict(family="gemma2", cast_lm_head_to_fp32=True),
}


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_grpo_trains_as_without_the_patch(tmp_path, variant, monkeypatch):
    used = []
    call = integration._FusedForward.__call__
    monkeypatch.setattr(integration._FusedForward, "__call__", lambda *a, **k: used.append(1) or call(*a, **k))
    theirs = run_grpo(tmp_path, False, **VARIANTS[variant])
    assert not used
    ours = run_grpo(tmp_path, True, **VARIANTS[variant])
    assert used, "the trainer did not use the operator"
    check_same_training(ours, theirs)
    assert len(ours.calls) == len(theirs.calls)
    for (logps, entropies), (other_logps, other_entropies) in zip(ours.calls, theirs.calls, strict=True):
        torch.testing.assert_close(logps, other_logps, rtol=1e-4, atol=1e-4)
        if entropies is not None:
            torch.testing.assert_close(entropies, other_entropies, rtol=1e-4, atol=1e-4)
    assert any(entry.get("loss", 0) != 0 for entry in ours.state.log_history)


def test_grpo_with_an_adapter_and_its_base_as_reference(tmp_path):
    """The reference log-probs come from the same head with the adapter switched off."""
    options = dict(peft_config=LoraConfig(r=2, target_modules=["q_proj"]), beta=0.1, num_iterations=2)
    check_same_training(run_grpo(tmp_path, True, **options), run_grpo(tmp_path, False, **options))


def test_a_larger_bonus_ends_with_more_entropy(tmp_path):
    ends = [run_grpo(tmp_path, True, entropy_coef=c, max_steps=6).calls[-1][1].mean().item() for c in (-1.0, 0.0, 1.0)]
    assert ends[0] < ends[1] < ends[2]


PACKED = dict(completion_only_loss=False, packing=True, max_length=32)


@pytest.mark.parametrize("options", [{}, dict(loss_type="dft"), PACKED], ids=["nll", "dft", "packed"])
def test_sft_trains_and_evaluates_as_without_the_patch(tmp_path, options):
    ours, theirs = run_sft(tmp_path, True, **options), run_sft(tmp_path, False, **options)
    check_same_training(ours, theirs)
    a, b = ours.evaluate(), theirs.evaluate()
    for name in ("eval_loss", "eval_entropy", "eval_mean_token_accuracy"):
        assert a[name] == pytest.approx(b[name], rel=2e-4)


def test_sft_adds_the_mixture_of_experts_loss(tmp_path):
    check_same_training(run_sft(tmp_path, True, family="mixtral"), run_sft(tmp_path, False, family="mixtral"))


class EntropySFTTrainer(EntropyTerm, SFTTrainer):
    entropy_coef = 2.0


def test_sft_with_an_entropy_term_trains_on_it(tmp_path):
    """The step's loss is the trainer's minus the coefficient times the mean entropy, and evaluation stays as it was."""
    plain = run_sft(tmp_path, True, max_steps=4)
    bonus, theirs = (run_sft(tmp_path, use, EntropySFTTrainer, max_steps=4) for use in (True, False))
    check_same_training(bonus, theirs)
    first, first_bonus = plain.state.log_history[0], bonus.state.log_history[0]
    assert first_bonus["loss"] == pytest.approx(first["loss"] - 2.0 * first["entropy"], rel=1e-5)
    assert bonus.state.log_history[-2]["entropy"] > plain.state.log_history[-2]["entropy"] + 0.01
    untrained = run_sft(tmp_path, True, EntropySFTTrainer, learning_rate=0.0)
    assert untrained.evaluate()["eval_loss"] == pytest.approx(
        run_sft(tmp_path, True, learning_rate=0.0).evaluate()["eval_loss"]
    )


def test_the_entropy_term_needs_a_trainer_whose_forward_gives_entropies(tmp_path):
    trainer = run_sft(tmp_path, True, EntropySFTTrainer, max_steps=1)
    trainer.compute_loss_func = lambda outputs, labels, num_items_in_batch: outputs.logits.mean()
    with pytest.raises(RuntimeError, match="entropy"):
        trainer.train()


def test_liger_kernels_keep_the_trainers_fused_head(tmp_path):
    """Liger's own fused loss would replace the forward: the trainer must have switched that one kernel off."""
    with patched(True), pytest.warns(FutureWarning, match="use_liger_kernel"):
        trainer = GRPOTrainer(
            model=tiny.model(),
            reward_funcs=tiny.length_reward,
            args=GRPOConfig(output_dir=str(tmp_path), use_liger_kernel=True, **GRPO),
            train_dataset=tiny.prompts(),
            processing_class=tiny.tokenizer(),
        )
    assert trainer.args.liger_kernel_config["fused_linear_cross_entropy"] is False
    ids = torch.randint(2, 200, (1, 6))
    out = trainer.model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids, fused_lm_head=True)
    assert out.entropy.requires_grad
