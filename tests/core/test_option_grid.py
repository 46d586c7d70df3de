"""Every option, alone and together, in every dtype and at ragged vocabulary sizes, against the fp64 oracle.

All outputs get an upstream gradient at once, so each test also checks the joint gradient. Cases NUM-01, NUM-18, AMP-03.
"""

import pytest
import torch
from problems import all_losses, check_losses, check_statistics, given, problem

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
VOCABULARIES = [1, 2, 3, 127, 129, 257, 1000]
LARGE = 32001  # 32 blocks of columns, the last of 257
# name: (tensor options, other options)
OPTIONS = {
    "defaults": ((), {}),
    "sum": ((), dict(reduction="sum")),
    "none": ((), dict(reduction="none")),
    "bias": (("linear_bias",), {}),
    "class weight": (("weight",), {}),
    "token weight": (("token_weight",), {}),
    "class and token weight": (("weight", "token_weight"), {}),
    "label smoothing": ((), dict(label_smoothing=0.1)),
    "label smoothing, class weight": (("weight",), dict(label_smoothing=0.3)),
    "only smoothing": (("weight",), dict(label_smoothing=1.0)),
    "z-loss": ((), dict(lse_square_scale=1e-2)),
    "entropy": ((), dict(entropy_coef=0.3)),
    "negative entropy": ((), dict(entropy_coef=-0.3, reduction="sum")),
    "softcap": ((), dict(softcap=3.0)),
    "logit scale": ((), dict(logit_scale=0.125)),
    "negative logit scale": ((), dict(logit_scale=-0.5)),
    "temperature": ((), dict(temperature=0.7)),
    "token temperature": (("temperature",), {}),
    "ignore a class": ((), dict(ignore_index=0)),
}
TOGETHER = dict(label_smoothing=0.1, lse_square_scale=1e-2, entropy_coef=0.3, softcap=5.0, logit_scale=0.5)
for _reduction in ("mean", "sum", "none"):
    OPTIONS[f"all, {_reduction}"] = (
        ("linear_bias", "weight", "token_weight", "temperature"),
        TOGETHER | dict(reduction=_reduction),
    )


GRID = [(option, vocab) for option in OPTIONS for vocab in VOCABULARIES]
GRID += [(option, LARGE) for option in ("defaults", "bias", "label smoothing, class weight", "all, mean", "all, none")]
GIVEN = [(option, vocab) for option, vocab in GRID if option != "bias" and vocab not in (2, 3, 257)]


def small(vocab: int, dtype, option: str):
    names, options = OPTIONS[option]
    return problem((3, 4) if vocab < LARGE else (1, 5), 5, vocab, dtype, names, **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("option, vocab", GRID)
def test_loss_or_gradient_is_wrong_with_option(option, vocab, dtype):
    check_losses(small(vocab, dtype, option))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("option, vocab", GIVEN)
def test_loss_on_given_logits_is_wrong_with_option(option, vocab, dtype):
    check_losses(given(small(vocab, dtype, option)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [*VOCABULARIES, LARGE])
@pytest.mark.parametrize(
    "names, options",
    [
        ((), {}),
        (("linear_bias", "weight", "temperature"), dict(softcap=5.0, logit_scale=0.5)),
        ((), dict(ignore_index=0, temperature=0.7)),
    ],
    ids=["defaults", "all", "ignore a class"],
)
def test_statistic_or_its_gradient_is_wrong(names, options, vocab, dtype):
    check_statistics(problem((3, 4) if vocab < LARGE else (1, 5), 5, vocab, dtype, names, **options))


@pytest.mark.parametrize("option", [o for o in OPTIONS if o not in ("defaults", "sum", "none")])
def test_option_is_accepted_and_forgotten(option):
    """NUM-18: every option changes the loss."""
    p = small(129, torch.float32, option)
    default = problem((3, 4), 5, 129, reduction=p.options.get("reduction", "mean"))
    default.target = p.target
    ours, without = all_losses(p)["loss"], all_losses(default)["loss"]
    assert not torch.allclose(ours, without, rtol=1e-4)
