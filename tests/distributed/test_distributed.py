"""What goes wrong when a vocabulary, or the tokens, are spread over ranks; see ranks.py for how the checks run."""

import pytest
import ranks

# The first test runs every check: a minute on two idle cores, several where they are busy.
pytestmark = pytest.mark.timeout(900)
MODULES = ["vocabulary_checks", "dtensor_checks", "token_checks", "model_checks"]


@pytest.fixture(scope="session")
def said(tmp_path_factory, worker_id):
    folder = tmp_path_factory.getbasetemp()
    return ranks.results(MODULES, folder if worker_id == "master" else folder.parent)


@pytest.mark.parametrize("name", [name for module in MODULES for name in ranks.names(module)])
def test_ranks(said, name):
    assert not said[name], "\n".join(said[name])
