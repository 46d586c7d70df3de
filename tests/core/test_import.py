"""The package without Triton, without Liger and without CUDA. Case CMP-06."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
sys.path.insert(0, ROOT)
BLOCK
try:
    import liger_kernel.transformers
    raise SystemExit("the stub does not stop Liger")
except ImportError:
    pass
import torch
import liger_entropy as le
module = le.LigerFusedLinearCrossEntropyLoss(return_entropy_loss=True, return_z_loss=True)
x, w = torch.randn(4, 5, requires_grad=True), torch.randn(7, 5, requires_grad=True)
t = torch.tensor([0, 1, -100, 3])
out = module(w, x, t)
assert type(out) is le.CrossEntropyOutput and isinstance(module, torch.nn.Module)
(out.loss + out.entropy_loss).backward()
torch.testing.assert_close(out.loss, torch.nn.functional.cross_entropy(x @ w.T, t))
try:
    le.linear_cross_entropy(x, w, t, options=le.ComputeOptions(backend="triton"))
    raise SystemExit("the explicit backend fell back")
except RuntimeError as error:
    assert "triton" in str(error)
import os
os.environ["TRITON_INTERPRET"] = "1"
try:
    le.linear_cross_entropy(x, w, t, options=le.ComputeOptions(backend="triton"))
    raise SystemExit("the explicit backend fell back")
except RuntimeError as error:
    assert "REASON" in str(error), error
"""
STUBS = {
    "not installed": ("sys.modules['triton'] = None", "not installed"),
    "broken": ("sys.path.insert(0, STUB)", "cannot be imported"),
}


@pytest.mark.parametrize("stub", STUBS)
def test_package_needs_triton_or_cuda(stub, tmp_path):
    """CMP-06"""
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").write_text("raise ImportError('libtriton.so is missing')\n")
    block, reason = STUBS[stub]
    program = PROGRAM.replace("BLOCK", block).replace("STUB", repr(str(tmp_path))).replace("REASON", reason)
    environment = {"CUDA_VISIBLE_DEVICES": "", "PATH": "", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, "-c", program.replace("ROOT", repr(str(ROOT)))],
        env=environment, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
