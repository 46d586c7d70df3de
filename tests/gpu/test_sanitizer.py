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


@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "initcheck"])
def test_kernels_are_not_clean(tool):
    assert SANITIZER is not None
    command = [SANITIZER, "--tool", tool, "--error-exitcode", "9", sys.executable, "sanitized.py"]
    root = Path(__file__).resolve().parent.parent.parent
    path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": path}
    run = subprocess.run(command, cwd=Path(__file__).parent, env=environment, capture_output=True, text=True)
    kernels = {line.split("at ")[1] for line in run.stdout.splitlines() if line.startswith("=========     at ")}
    assert run.returncode == 0 and not kernels, f"{sorted(kernels)}\n{run.stderr[-3000:]}"
    # racecheck has warnings beside its errors, which leave the exit code at 0.
    assert re.search(r"RACECHECK SUMMARY: 0 hazards|ERROR SUMMARY: 0 errors", run.stdout), run.stdout[-1000:]
