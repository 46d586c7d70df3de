"""What goes wrong when a patched model is trained in DDP, FSDP2, FSDP1 or ZeRO-3; sharded_checks.py has the checks."""

import importlib.util
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "distributed"))
import ranks

# The first test runs every check: most of a minute on two idle cores, several where they are busy.
pytestmark = pytest.mark.timeout(900)
MODULE = "sharded_checks"


@pytest.fixture(scope="session")
def said(tmp_path_factory, worker_id):
    """One run of all checks in gloo processes, shared by the test processes."""
    folder = tmp_path_factory.getbasetemp()
    folder = (folder if worker_id == "master" else folder.parent) / "sharded"
    folder.mkdir(exist_ok=True)
    return ranks.results([MODULE], folder)


@pytest.mark.parametrize("name", ranks.names(MODULE))
def test_ranks(said, name):
    if "zero3" in name and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed (pip install deepspeed==0.19.8)")
    assert not said[name], "\n".join(said[name])
