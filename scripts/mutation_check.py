"""Plant one fault at a time in a copy of the library and show which test catches it.

    python scripts/mutation_check.py [--jobs 2] [--only WORD ...]

The faults are in faults.txt. Exits with 1 when a fault survives its tests, with 2 when the check itself cannot run: a
fault's text is no longer in the source exactly once, the tests fail without any fault, or a fault breaks the import.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import hypothesis  # noqa: F401
import pytest
import torch
import transformers  # noqa: F401

ROOT = Path(__file__).resolve().parent.parent
COPIED = ("liger_entropy", "tests", "convergence", "benchmarks", "pyproject.toml")
# For one fault; it may also make the code wait for ever.
SECONDS = 400
FORK = multiprocessing.get_context("fork")
WRONG_COPY = 70
# In tests/distributed/ranks.py: a rank whose check fails goes on, and the others wait for it in a collective, minutes
# for every check. One failure is enough here: it ends the ranks.
PATIENT, HASTY = '        return f"rank {rank}: {traceback.format_exc()}"\n', "        raise\n"


class Fault(NamedTuple):
    name: str
    file: str
    tests: tuple[str, ...]
    old: str
    new: str

    @property
    def interpret(self) -> bool:
        return all(name.startswith("tests/interpret") for name in self.tests)


class Outcome(NamedTuple):
    status: int | None  # pytest's: 0 all tests passed, 1 some failed; None: killed after SECONDS
    test: str  # the first that failed
    seconds: float
    output: str


def read_faults() -> list[Fault]:
    """See the head of faults.txt."""
    faults, file, tests = [], "", ()
    text = (Path(__file__).parent / "faults.txt").read_text().split("\n\n", 2)[2]
    for block in re.split(r"^(?=[@=] )", text, flags=re.MULTILINE):
        if block.startswith("@"):
            file, *names = block[2:].split()
            tests = tuple(f"tests/{name}" for name in names)
        elif block.startswith("="):
            name, *lines = block.rstrip("\n").splitlines()
            old, new = ("\n".join(line[1:] for line in lines if line[:1] == sign) for sign in "-+")
            faults.append(Fault(name[2:], file, tests, old, new))
    return faults


def copy_library(folder: Path) -> None:
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.png"))
        else:
            shutil.copy(source, folder / name)
    ranks = folder / "tests" / "distributed" / "ranks.py"
    text = ranks.read_text()
    assert text.count(PATIENT) == 1, "tests/distributed/ranks.py has changed: see PATIENT"
    ranks.write_text(text.replace(PATIENT, HASTY))


def plant(fault: Fault, folder: Path) -> None:
    path = folder / "liger_entropy" / fault.file
    path.write_text(path.read_text().replace(fault.old, fault.new))


def misplaced(faults: list[Fault]) -> list[str]:
    """Faults whose text is not in the source exactly once."""
    lines = []
    for fault in faults:
        count = (ROOT / "liger_entropy" / fault.file).read_text().count(fault.old)
        if count != 1:
            lines.append(f"{fault.name}: its text is {count} times in liger_entropy/{fault.file}, not once")
    return lines


def run_tests(folder: Path, tests: tuple[str, ...], interpret: bool) -> Outcome:
    """The tests in the copy, up to the first that fails, in a fork of this process, which has the imports behind it."""
    log, start = folder / "log.txt", time.perf_counter()
    child = FORK.Process(target=_pytest, args=(folder, tests, interpret, log))
    child.start()
    child.join(SECONDS)
    if child.exitcode is None:
        os.killpg(child.pid, signal.SIGKILL)
        child.join()
        return Outcome(None, f"still running after {SECONDS} s", SECONDS, log.read_text(errors="replace"))
    output = log.read_text(errors="replace")
    return Outcome(child.exitcode, first_failure(output), time.perf_counter() - start, output)


def first_failure(output: str) -> str:
    """The test that failed, and the check in it that a rank ran; nothing where no test did."""
    test = re.search(r"^(?:FAILED|ERROR) (\S+::[^\s\[]+)", output, re.MULTILINE)
    check = re.search(r"_checks\.py\", line \d+, in (\w+)", output)
    return (test[1] if test else "") + (f" {check[1]}" if test and check else "")


def _pytest(folder: Path, tests: tuple[str, ...], interpret: bool, log: Path) -> None:
    os.setsid()  # with the processes that tests start it is one group to kill
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    # Triton reads the variable when the library imports it; processes that a test starts look in PYTHONPATH.
    os.environ.update(PYTHONPATH=str(folder), TRITON_INTERPRET="1" if interpret else "0")
    sys.dont_write_bytecode = True
    file = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    status = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-m", "not gpu and not slow", *tests])
    sys.stdout.flush()
    tested = getattr(sys.modules.get("liger_entropy"), "__file__", None)
    # At once: the exit handlers of a process that a thread forked fail, with the status of a failed test.
    os._exit(int(status) if tested and Path(tested).is_relative_to(folder) else WRONG_COPY)


def try_copy(fault: Fault | None, tests: tuple[str, ...], interpret: bool) -> Outcome:
    with tempfile.TemporaryDirectory(prefix="fault-") as name:
        folder = Path(name)
        copy_library(folder)
        if fault is not None:
            plant(fault, folder)
        return run_tests(folder, tests, interpret)


def check_without_fault(faults: list[Fault], jobs: int) -> list[str]:
    """The same tests on an untouched copy: only then does a failure speak of the fault."""
    groups = sorted({((test,), fault.interpret) for fault in faults for test in fault.tests})
    lines = []
    with ThreadPoolExecutor(jobs) as pool:
        for (tests, _), outcome in zip(groups, pool.map(lambda group: try_copy(None, *group), groups), strict=True):
            passed = outcome.status == 0
            print(
                f"{'passes' if passed else 'FAILS':8}{outcome.seconds:6.0f} s  without a fault: {tests[0]}", flush=True
            )
            if not passed:
                lines.append(f"{tests[0]} fails without a fault\n{outcome.output[-2000:]}")
    return lines


def verdict(outcome: Outcome) -> str:
    if outcome.status == 1 and not outcome.test:
        return "BROKEN"
    return {0: "SURVIVED", 1: "caught", None: "caught"}.get(outcome.status, "BROKEN")


def check_faults(faults: list[Fault], jobs: int) -> dict[str, int]:
    """One line per fault; how many had each verdict."""
    counts = {"caught": 0, "SURVIVED": 0, "BROKEN": 0}
    with ThreadPoolExecutor(jobs) as pool:
        for fault, outcome in zip(faults, pool.map(lambda f: try_copy(f, f.tests, f.interpret), faults), strict=True):
            what = verdict(outcome)
            counts[what] += 1
            print(f"{what:9}{outcome.seconds:5.0f} s  {fault.file:22} {fault.name:58} {outcome.test}", flush=True)
            if what == "BROKEN":
                print(outcome.output[-2000:], file=sys.stderr)
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=2, help="faults at a time (default 2)")
    parser.add_argument("--only", nargs="+", default=[""], help="faults whose name or file contains one of these")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    assert "triton" not in sys.modules, "the forks could not choose Triton's interpreter any more"
    faults = [f for f in read_faults() if any(word in f.name or word in f.file for word in arguments.only)]
    problems = misplaced(faults) or check_without_fault(faults, arguments.jobs)
    if problems:
        print("\n".join(problems), file=sys.stderr)
        return 2
    counts = check_faults(faults, arguments.jobs)
    print(f"{len(faults)} faults: {counts['caught']} caught, {counts['SURVIVED']} survived, {counts['BROKEN']} broken")
    return 2 if counts["BROKEN"] else int(counts["SURVIVED"] > 0)


if __name__ == "__main__":
    sys.exit(main())
