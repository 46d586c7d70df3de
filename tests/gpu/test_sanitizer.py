"""NVIDIA's compute-sanitizer over every kernel, see sanitized.py."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SANITIZER = shutil.which("compute-sanitizer")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(SANITIZER is None, reason="no compute-sanitizer on the path"),
]


def run(tool: str, *options: str) -> subprocess.CompletedProcess:
    assert SANITIZER is not None
    root = Path(__file__).resolve().parent.parent.parent
    path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": path}
    command = [SANITIZER, "--tool", tool, *options, sys.executable, "sanitized.py"]
    return subprocess.run(command, cwd=Path(__file__).parent, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("tool", ["memcheck", "initcheck"])
def test_kernels_are_not_clean(tool):
    found = run(tool, "--error-exitcode", "9")
    kernels = {line.split("at ")[1] for line in found.stdout.splitlines() if line.startswith("=========     at ")}
    assert found.returncode == 0 and not kernels, f"{sorted(kernels)}\n{found.stderr[-3000:]}"
    assert "ERROR SUMMARY: 0 errors" in found.stdout, found.stdout[-1000:]


def test_threads_of_a_kernel_race():
    """Warnings count. cuBLAS's own kernels, of which CUDA 13's nvjet_sm90_tss_64x8_64x16_1x4_h_bz_NNT is reported, do
    not; to exclude them from the run ended the tool with an internal error."""
    found = run("racecheck", "--print-limit", "100000")
    assert found.returncode == 0, found.stdout[-1000:] + found.stderr[-3000:]
    assert "RACECHECK SUMMARY" in found.stdout, found.stdout[-1000:]
    kernels = set(re.findall(r" at (\S[^\n]*?)\+0x", found.stdout))
    assert not [k for k in kernels if not k.startswith("nvjet_")], kernels
    assert kernels or "RACECHECK SUMMARY: 0 hazards" in found.stdout, found.stdout[-3000:]
