# Targets for people. `make` alone lists them.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help install demo test faults bench bench-merging bench-promotion bench-training gain lint format lock schemas clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(STAMP): requirements.lock requirements-nodeps.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "remerge needs Python 3.11 or newer; name one with `make PYTHON=python3.12 ...`")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing the locked packages into $(VENV) (about 1.5 GB, a few minutes the first time) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-nodeps.lock
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

install: $(STAMP) ## build .venv from the lock file

demo: $(STAMP) ## train a portfolio, change two regions' policies, show what was promoted (KEEP=1 leaves the stack up)
	@$(BIN)/remerge demo $(if $(KEEP),--keep)

test: $(STAMP) ## the whole test suite, on the real stack
	@$(BIN)/python -m pytest -n 2 --dist worksteal $(ARGS)

faults: $(STAMP) ## kill, cut off, damage and race everything on the real stack, and print what was lost: nothing (an hour and a quarter)
	@$(BIN)/python -m pytest -n 0 -m "" --keep-table docs/reliability.md tests/faults tests/system/test_reconcile.py $(ARGS)

bench: $(STAMP) ## how fast accounting, training and merging are, beside their targets (many minutes, 5 GB of disk)
	@$(BIN)/python -m tests.benchmarks.bench_accounting $(ARGS)
	@$(BIN)/python -m tests.benchmarks.bench_training $(ARGS)
	@$(BIN)/python -m tests.benchmarks.bench_merging $(ARGS)

bench-promotion: $(STAMP) ## from policy.changed to the switched pointer, part by part (two minutes)
	@$(BIN)/python -m tests.benchmarks.bench_promotion $(ARGS)

bench-training: $(STAMP) ## what a private step costs, beside the same step without privacy and plain Opacus (minutes)
	@$(BIN)/python -m tests.benchmarks.bench_training $(ARGS)
	@$(BIN)/python -m tests.benchmarks.bench_threads

bench-merging: $(STAMP) ## how fast files are merged, beside cat (5 GB of disk; ARGS="--size 50" for less)
	@$(BIN)/python -m tests.benchmarks.bench_merging $(ARGS)

gain: $(STAMP) ## what a merge gains in accuracy on the demo's data, over 24 seeds (minutes)
	@$(BIN)/python -m tests.benchmarks.digits_gain $(ARGS)

lint: $(STAMP) ## ruff, and strict typing of accounting/
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy accounting

format: $(STAMP) ## let ruff rewrite the code
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

lock: ## make requirements.lock anew from pyproject.toml
	@rm -rf .lockenv && $(PYTHON) -m venv .lockenv && .lockenv/bin/pip install --quiet '.[dev]'
	@sed -n '/^#/p' requirements.lock > .lockenv/lock
	@.lockenv/bin/pip freeze --all | grep -Ev '^(remerge|pip)( |==)' | sed 's/^\(torch==[0-9.]*\)+.*/\1/' >> .lockenv/lock
	@mv .lockenv/lock requirements.lock && rm -rf .lockenv build *.egg-info

schemas: $(STAMP) ## write infra/schemas/ anew from the document types
	@$(BIN)/python -m infra.documents
	@$(BIN)/python -m tasks.account_file

clean: ## stop the stack, and remove .venv and .remerge (the embedded stack's data!)
	@test ! -x $(BIN)/remerge || $(BIN)/remerge down
	@rm -rf $(VENV) .remerge
