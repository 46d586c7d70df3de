"""The package as it is shipped: version, typing marker, packages."""

import itertools
import re
from pathlib import Path

import tomllib
from setuptools import find_packages

import liger_entropy

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_version_is_the_same_everywhere():
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)[1]
    assert PYPROJECT["project"]["version"] == newest == liger_entropy.__version__


def test_typing_marker_is_shipped():
    assert (ROOT / "liger_entropy" / "py.typed").is_file()
    assert "py.typed" in PYPROJECT["tool"]["setuptools"]["package-data"]["liger_entropy"]


def test_every_folder_with_modules_is_a_shipped_package():
    shipped = set(find_packages(str(ROOT), include=PYPROJECT["tool"]["setuptools"]["packages"]["find"]["include"]))
    folders = {path.parent.relative_to(ROOT) for path in (ROOT / "liger_entropy").rglob("*.py")}
    assert {".".join(folder.parts) for folder in folders} == shipped


def test_every_exported_name_exists():
    for name in liger_entropy.__all__:
        assert hasattr(liger_entropy, name), name


def test_lock_pins_every_version_and_satisfies_the_project():
    from packaging.requirements import Requirement

    lines = [line for line in (ROOT / "requirements" / "dev.txt").read_text().splitlines() if not line.startswith("#")]
    pinned = {name.lower().replace("_", "-"): version for name, version in (line.split("==") for line in lines)}
    project = PYPROJECT["project"]
    for entry in itertools.chain(project["dependencies"], *project["optional-dependencies"].values()):
        requirement = Requirement(entry)
        if requirement.name != project["name"]:
            assert requirement.specifier.contains(pinned[requirement.name.lower()]), entry
