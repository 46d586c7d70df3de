"""The classes on a GPU, where the patched members run the Triton kernels, and the long run."""

import pytest
import torch

from .classes import CLASSES
from .long_run import Size, judge, train_all, write
from .test_classes import run_all

pytestmark = [
    pytest.mark.convergence,
    pytest.mark.gpu,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("name", [name for name in CLASSES if not name.endswith("kernels")])
def test_members_share_one_trajectory_on_the_gpu(name):
    run_all(CLASSES[name], "cuda")


def test_patched_training_drifts_beyond_the_noise_of_rounding(tmp_path):
    runs = train_all(Size(), "cuda")
    verdict = judge(runs)
    write(tmp_path, Size(), runs, verdict, "cuda")
    assert verdict["within_noise"], f"{verdict}; see {tmp_path}"
