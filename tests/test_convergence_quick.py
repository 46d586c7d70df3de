"""A short run of the convergence classes: patched training follows plain training."""

from dataclasses import replace

import pytest
import torch

from convergence.classes import CLASSES
from convergence.compare import violations
from convergence.objectives import EveryOption
from convergence.training import Trajectory, train

STEPS = 12


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    "name, members",
    [
        ("llama-fp32", ["patched", "patched, all cached"]),
        ("gemma2-fp32", ["patched"]),
        ("granite-fp32", ["patched"]),
        ("mixtral-fp32", ["patched"]),
        ("gpt2-bf16", ["patched"]),
        ("every-option-fp32", ["fused", "fused, all cached"]),
        ("entropy+0.1", ["patched"]),
    ],
)
def test_patched_training_drifts_from_plain(name, members):
    cls = replace(CLASSES[name], steps=STEPS)
    expected = cls.run("plain")
    assert expected.loss[-1] < expected.loss[0], "the model learned nothing, so any loss would do"
    found = {member: violations(expected, cls.run(member), cls.bounds) for member in members}
    assert not any(found.values()), found


def test_shift_that_no_single_step_shows_passes():
    """The bound on the mean signed difference is there for this."""
    bounds = CLASSES["llama-fp32"].bounds
    expected = Trajectory(*([1.0 + step / 100 for step in range(100)] for _ in range(6)))
    shifted = replace(expected, loss=[value - 2e-5 for value in expected.loss])
    noisy = replace(expected, loss=[value + (-1) ** step * 2e-5 for step, value in enumerate(expected.loss)])
    assert violations(expected, shifted, bounds)
    assert not violations(expected, noisy, bounds)


def test_broken_run_passes():
    bounds = CLASSES["llama-fp32"].bounds
    expected = Trajectory(*([1.0, 2.0] for _ in range(6)))
    assert violations(expected, replace(expected, entropy=[1.0, float("nan")]), bounds)
    with pytest.raises(ValueError, match="loss: 1 values beside the reference's 2"):
        violations(expected, replace(expected, loss=[1.0]), bounds)


@pytest.mark.parametrize(
    "wrong",
    [dict(label_smoothing=0.101), dict(z_loss=1.02e-3), dict(entropy_coef=0.0505), dict(temperature=1.301)],
    ids=str,
)
def test_slightly_wrong_option_passes(wrong):
    """The bounds are narrow enough to see one or two per cent of an option within twelve steps."""
    expected = train("llama", EveryOption().plain, STEPS)
    found = train("llama", replace(EveryOption(), **wrong).fused(), STEPS)
    assert violations(expected, found, CLASSES["every-option-fp32"].bounds)
