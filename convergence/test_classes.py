"""Every member of every class shares the plain member's trajectory, and so does the recorded one."""

from itertools import pairwise

import pytest
import torch

from .classes import CLASSES, ENTROPY_COEFFICIENTS, EquivalenceClass
from .compare import violations
from .data import text
from .record import recorded
from .training import Trajectory

pytestmark = [pytest.mark.convergence, pytest.mark.timeout(1200)]


def differences(cls: EquivalenceClass, runs: dict[str, Trajectory]) -> list[str]:
    return [f"{member}: {line}" for member, run in runs.items() for line in violations(runs["plain"], run, cls.bounds)]


def run_all(cls: EquivalenceClass, device: str = "cpu") -> dict[str, Trajectory]:
    torch.set_num_threads(1)
    runs = {member: cls.run(member, device) for member in cls.members}
    assert not differences(cls, runs), "\n".join(differences(cls, runs))
    return runs


def check_record(cls: EquivalenceClass, plain: Trajectory) -> None:
    environment, reference = recorded(cls.name)
    if environment["text"] == text().digest:
        found = violations(reference, plain, cls.bounds)
        assert not found, f"training has changed since {cls.name} was recorded:\n" + "\n".join(found)


@pytest.mark.parametrize("name", [name for name in CLASSES if not name.startswith("entropy")])
def test_members_share_one_trajectory(name):
    runs = run_all(CLASSES[name])
    check_record(CLASSES[name], runs["plain"])


def test_entropy_term_orders_the_held_out_entropy():
    """Plain torch and the library agree at every coefficient, and more of it leaves a broader distribution."""
    held_out = {0.0: CLASSES["llama-fp32"].run("patched").held_out[1]}
    for coefficient in ENTROPY_COEFFICIENTS:
        cls = CLASSES[f"entropy{coefficient:+}"]
        runs = run_all(cls)
        check_record(cls, runs["plain"])
        held_out[coefficient] = runs["patched"].held_out[1]
    ordered = [held_out[c] for c in sorted(held_out)]
    assert all(b > a + 0.02 for a, b in pairwise(ordered)), held_out


def test_records_are_of_this_text():
    """Python's own sources differ between its versions; then only the members can be compared with each other."""
    environment, _ = recorded("llama-fp32")
    if environment["text"] != text().digest:
        pytest.skip(
            f"recorded on the text of Python {environment['python']}; trajectories on another cannot be compared"
        )
