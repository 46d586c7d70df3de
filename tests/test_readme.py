"""Every Python snippet of the README runs, and what it says of commands and options is so."""

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"^```python\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(
    "snippet", SNIPPETS, ids=lambda snippet: re.search(r"from liger_entropy\S* import \w+", snippet)[0]
)
def test_snippet_runs(snippet):
    torch.manual_seed(0)
    exec(compile(snippet, "README.md", "exec"), {"__name__": "readme"})


def test_first_screen_has_the_four_uses():
    first = README[: README.index("## Install")]
    for use in (
        "LigerFusedLinearCrossEntropyLoss(",
        "linear_cross_entropy(",
        "apply_liger_entropy(",
        "linear_token_statistics(",
    ):
        assert use in first


def test_named_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`make ([a-z-]+)`", README):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target


def test_named_demo_options_exist(capsys):
    from liger_entropy.demo.__main__ import parse_arguments

    with pytest.raises(SystemExit):
        parse_arguments(["--help"])
    known = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
    paragraph = re.search(r"The demo has options.*?explains them", README, flags=re.DOTALL)[0]
    assert set(re.findall(r"--[a-z-]+", paragraph)) <= known
