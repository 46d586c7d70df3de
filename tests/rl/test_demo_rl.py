"""The GRPO demo, in small."""

import sys

import pytest
import torch

from liger_entropy.demo_rl import __main__ as command
from liger_entropy.demo_rl import task
from liger_entropy.demo_rl.training import Recipe, advantages, build_policy, policy_loss, rollout, statistics, train


def test_reward_is_one_for_right_answers_alone():
    right = [f"{n:04d}" for n in range(10000) if task.reward(12, f"{n:04d}") == 1.0]
    assert len(right) == task.answers(12) == 415
    assert task.reward(12, "33=3") == task.reward(12, "99|9") == 0.0
    assert 0 < task.reward(12, "3334") < 1


def test_statistics_are_those_of_the_completion_tokens():
    policy = build_policy()
    tokens, _ = rollout(policy, Recipe(prompts=2, group=2), torch.Generator().manual_seed(0))
    logprob, entropy = statistics(policy, tokens)
    log_p = policy(tokens).logits.double().log_softmax(-1)[:, -task.DIGITS - 1 : -1]
    want = log_p.gather(2, tokens[:, -task.DIGITS :, None])[..., 0]
    torch.testing.assert_close(logprob.double(), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), -(log_p.exp() * log_p).sum(-1), rtol=1e-5, atol=1e-5)


def test_advantages_are_relative_to_the_group():
    a = advantages(torch.tensor([1.0, 0.0, 5.0, 5.0]), group=2)
    assert a[0] == -a[1] and a[0] > 0 and (a[2:] == 0).all()


def test_on_policy_gradient_is_that_of_the_advantage_weighted_log_prob():
    logprob, a = torch.randn(4, 3, requires_grad=True), torch.randn(4)
    (got,) = torch.autograd.grad(policy_loss(logprob, logprob.detach(), a, 0.2), logprob)
    torch.testing.assert_close(got, -(a[:, None] / 12).expand(4, 3))


def test_ratios_beyond_the_clip_stop_pushing():
    logprob = torch.tensor([[0.5, -0.5]], requires_grad=True)
    (got,) = torch.autograd.grad(policy_loss(logprob, torch.zeros(1, 2), torch.ones(1), 0.2), logprob)
    assert got[0, 0] == 0 and got[0, 1] < 0


def test_the_bonus_keeps_entropy_that_a_run_without_it_loses():
    small = dict(steps=20, prompts=4, learning_rate=6e-3)
    _, plain = train(Recipe(**small))
    _, held = train(Recipe(target_entropy=2.3, **small))
    assert plain.reward[-1] > plain.reward[0] + 0.1 and held.reward[-1] > held.reward[0]
    assert held.entropy[-1] > plain.entropy[-1] + 0.1
    assert set(plain.coef) == {0.0} and len(set(held.coef)) > 1


def test_command_writes_the_picture(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["demo_rl", "--steps", "2", "--out", str(tmp_path)])
    monkeypatch.setattr(command, "TOTALS", [12])
    command.main()
    assert (tmp_path / "grpo.png").stat().st_size > 10_000
    assert "of 415" in capsys.readouterr().out


def test_a_target_that_is_no_entropy_is_refused():
    with pytest.raises(ValueError, match="target"):
        train(Recipe(target_entropy=-1.0, steps=1))
