"""The classes on a GPU, where the patched members run the Triton kernels, and the long run."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from .classes import CLASSES, EquivalenceClass
from .compare import widened
from .long_run import Size, judge, train_all, write
from .test_classes import run_all

pytestmark = [
    pytest.mark.convergence,
    pytest.mark.gpu,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# What `python -m convergence.noise CLASS --device cuda` printed for each on an NVIDIA H200, torch 2.11.0+cu130,
# transformers 5.17.0, 2026-12-01; `--out` writes such a file. In five classes plain torch itself strays there by more
# than the bounds for a CPU: Mixtral (a token's routing flips), Qwen3, and the negative coefficient, which rewards
# runaway logits; of the last, only the first steps say anything there.
NOISE = json.loads((Path(__file__).parent / "noise_h200.json").read_text())
TIMES = 3


def on_gpu(cls: EquivalenceClass) -> EquivalenceClass:
    return replace(cls, bounds=widened(cls.bounds, NOISE[cls.name], TIMES))


@pytest.mark.parametrize("name", [name for name in CLASSES if not name.endswith("kernels")])
def test_members_share_one_trajectory_on_the_gpu(name):
    run_all(on_gpu(CLASSES[name]), "cuda")


def test_patched_training_drifts_beyond_the_noise_of_rounding(tmp_path):
    runs = train_all(Size(), "cuda")
    verdict = judge(runs)
    write(tmp_path, Size(), runs, verdict, "cuda")
    assert verdict["within_noise"], f"{verdict}; see {tmp_path}"
