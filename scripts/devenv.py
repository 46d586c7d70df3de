"""Run Python in the development environment: ``devenv.py ARG...`` is ``python ARG...`` there.

An active environment that satisfies pyproject.toml is used as it is. Otherwise ``.venv`` is, made anew from
requirements/dev.txt when it is missing or was made from another lock.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements" / "dev.txt"
VENV = ROOT / ".venv"
STAMP = VENV / "made-from"

# Runs in the environment that is looked at, with the requirements as arguments; a missing package raises.
PROBE = """
import sys
from importlib.metadata import version
from packaging.requirements import Requirement
for requirement in map(Requirement, sys.argv[1:]):
    if requirement.marker is None or requirement.marker.evaluate():
        found = version(requirement.name)
        if not requirement.specifier.contains(found, prereleases=True):
            sys.exit(f"{requirement} is needed, {found} is installed")
"""


def requirements() -> list[str]:
    """What pyproject.toml asks for, with the extras; the extras' references to the project itself left out."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    return [entry for entries in lists for entry in entries if not entry.startswith(project["name"])]


def active_python() -> Path | None:
    """The interpreter of the active environment, or None when it lacks something."""
    active = os.environ.get("VIRTUAL_ENV")
    python = Path(active, "bin", "python") if active else Path(shutil.which("python") or sys.executable)
    if not python.exists() or python.is_relative_to(VENV):
        return None
    probe = subprocess.run([python, "-c", PROBE, *requirements()], capture_output=True, text=True)
    if active and probe.returncode:
        reason = probe.stderr.strip().splitlines()[-1]
        print(f"devenv: {active} is not used ({reason}); using {VENV}", file=sys.stderr)
    return None if probe.returncode else python


def venv_python() -> Path:
    """The interpreter of ``.venv``, which is made first unless it comes from this very lock."""
    python = VENV / "bin" / "python"
    made_from = f"{sys.version_info[:2]} {hashlib.sha256(LOCK.read_bytes()).hexdigest()}"
    if STAMP.exists() and STAMP.read_text() == made_from and python.exists():
        return python
    print(f"devenv: making {VENV} from {LOCK.relative_to(ROOT)}, once; this takes a few minutes", file=sys.stderr)
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([sys.executable, "-m", "venv", "--clear", VENV], check=True)
    subprocess.run([*pip, "--requirement", LOCK], check=True)
    subprocess.run([*pip, "--no-deps", "--no-build-isolation", "--editable", ROOT], check=True)
    STAMP.write_text(made_from)
    return python


def main() -> None:
    if sys.version_info < (3, 11):
        sys.exit(
            f"devenv: the pinned versions need Python 3.11 or newer, this is {sys.version.split()[0]}: make PYTHON=..."
        )
    try:
        python = active_python() or venv_python()
    except subprocess.CalledProcessError as error:
        sys.exit(f"devenv: {' '.join(map(str, error.cmd))} failed with exit status {error.returncode}")
    # Tools such as pyright look for the environment on PATH.
    path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
    os.execve(python, [str(python), *sys.argv[1:]], {**os.environ, "PATH": path})


if __name__ == "__main__":
    main()
