"""Every test starts from the same seed, and every uninitialised buffer from NaN, so that reading one shows."""

import pytest
import torch
from hypothesis import settings

torch.use_deterministic_algorithms(True, warn_only=True)
torch.utils.deterministic.fill_uninitialized_memory = True

# The same examples in every run: a failure seen once is seen again.
settings.register_profile("repeatable", max_examples=25, deadline=None, derandomize=True)
settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
