"""Precision of log-probs on a trained model, and the importance ratio of unchanged weights."""

import pytest

from benchmarks.precision import errors, ratio_deviations, train


@pytest.fixture(scope="module")
def trained():
    return train(vocab=1500, hidden=64, steps=40, sequences=8)


def test_log_probs_are_those_of_an_fp32_head_and_a_hundred_times_those_of_bf16_logits(trained):
    largest = {name: float(e.max()) for name, e in errors(trained).items()}
    assert largest["this library"] <= 2 * largest["fp32 head"] + 1e-6
    assert largest["this library"] <= largest["logits staged in fp16"] / 100
    assert largest["this library"] <= largest["bf16 logits"] / 1000


def test_the_importance_ratio_of_unchanged_weights_is_one(trained):
    """To a few roundings of fp32: products of another shape may sum in another order."""
    deviations = ratio_deviations(trained)
    assert deviations["called again"] == 0
    for name, deviation in deviations.items():
        if name.startswith(("chunks", "one chunk", "batch")):
            assert deviation <= 5e-6, f"{name}: {deviation}"
    assert deviations["old from bf16 logits"] > 1e-3
