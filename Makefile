# Every target sets itself up: scripts/devenv.py runs Python in the active environment when that has what is needed,
# and otherwise in .venv, which it makes from requirements/dev.txt when it is missing or out of date.
PYTHON ?= python3
WORKERS ?= 2
RUN = $(PYTHON) scripts/devenv.py
# One thread a worker: two workers with two threads each are slower on two cores than one after the other.
PYTEST = OMP_NUM_THREADS=1 $(RUN) -m pytest

.PHONY: help test test-interpret test-gpu test-convergence test-convergence-gpu checkstyle format demo benchmark

help: ## Print this list.
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 24

test: test-interpret ## All tests for a machine without a GPU.
	$(PYTEST) -n $(WORKERS) -m "not gpu and not slow"

test-interpret: ## The Triton kernels, run by Triton's interpreter on the CPU (part of `make test`).
	TRITON_INTERPRET=1 $(PYTEST) -n $(WORKERS) -m "not gpu and not slow" tests/interpret

test-gpu: ## The tests that need a CUDA device.
	$(RUN) -m pytest -m gpu

test-convergence: ## Trajectories of patched and unpatched training, on the CPU.
	$(PYTEST) -n $(WORKERS) -m "not gpu" convergence

test-convergence-gpu: ## The same for the runs that need a CUDA device.
	$(RUN) -m pytest -m gpu convergence

checkstyle: ## Lint, format check and types; changes nothing.
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m pyright

format: ## Apply the formatter and the safe lint fixes.
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

demo: ## Train a small model on Python's own sources; table and picture in demo_out/.
	$(RUN) -m liger_entropy.demo --out demo_out

benchmark: ## Time, memory and error beside other implementations.
	$(RUN) -m benchmarks
