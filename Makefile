# `make` lists what there is. Every target makes the virtual environment in .venv by itself.
PYTHON ?= python3
ARGS ?=
BIN := .venv/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Where this is set, each of the hundreds of processes that the tests start would compile the whole project again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test test-full test-quick test-api test-pythons test-engines check lint docs screenshots bench bench-full clean

help: ## Show this list
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# The engine of ARGS="--engine celery", if any: its extra and a Redis are installed.
ENGINE := $(if $(findstring --engine,$(ARGS)),$(filter celery dramatiq rq,$(patsubst --engine=%,%,$(ARGS))))

demo: .venv/.runtime $(ENGINE:%=.venv/.with-%) ## Show everything at work on an example shop, and audit the outcome (ARGS="--keep", ARGS="--engine celery")
	@$(if $(ENGINE),sh scripts/test-servers.sh redis-server)
	@$(BIN)/asynctask demo $(ARGS)

# TEST_STATUS, if it is set, names a file for pytest's own exit code: make has only one code for every failure.
test: .venv/.dev ## Run the tests, except those marked full (ARGS="-k name" picks some, ARGS="-n 0" runs them in one process)
	@sh scripts/test-servers.sh
	@$(BIN)/python -m pytest -n 6 --dist worksteal --tb=native $(ARGS) || { code=$$?; [ -n "$$TEST_STATUS" ] || exit $$code; echo $$code > "$$TEST_STATUS"; }

test-full: export TEST_FULL = 1
test-full: override ARGS += --every-database
test-full: test ## Run every test on every database and Redis, with many more drawn examples, for an hour or more

# On SQLite, of the integration tests, those of the promises, of the ledger and of what stands on it; of the unit tests all but
# the slow ones and those of the sources.
QUICK := tests/unit tests/webapi/test_submitting.py $(addprefix tests/integration/test_,\
	promises.py ledger.py ledger_splits.py small_tasks.py sessions.py untracked.py)
SLOW := $(addprefix --ignore=tests/unit/test_,bookkeeping_model.py bookkeeping_mutants.py envelope.py example_promotions.py \
	extras.py internals.py interrupt.py layout.py lean_import.py readers.py readers_fuzz.py readers_text.py report_files.py \
	sessions_model.py workbook_child.py workbooks.py)

test-quick: .venv/.dev ## Run unit tests and the most telling others on SQLite alone, without a server, within a minute
	@$(BIN)/python -m pytest -q -n 2 --dist worksteal --tb=native --sqlite-alone $(QUICK) $(SLOW) $(ARGS)

test-api: .venv/.dev ## Call every operation of the API in every way that its document tells of, for 3 minutes (API_SECONDS=600)
	@API_SECONDS=$${API_SECONDS:-180} $(BIN)/python -m pytest -q tests/webapi/test_schemathesis.py $(ARGS)

test-pythons: .venv/.dev ## Run the unit tests on each of Python 3.11 to 3.14 that is installed (PYTHONS="3.12 3.13" picks some)
	@sh scripts/test-pythons.sh $(ARGS)

test-engines: .venv/.dev ## Run the tests of the engines on the oldest Celery, Dramatiq and RQ that are supported
	@sh scripts/test-servers.sh
	@sh scripts/test-engines.sh $(ARGS)

check: lint ## Run every check that is not a test of behaviour: format, lint, types, imports, docs
	$(BIN)/python -m pytest -q tests/unit/test_docs.py tests/unit/test_internals.py tests/unit/test_layout.py

lint: .venv/.dev ## Run those of them that `make test` does not run, too: format, lint, types, imports
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: .venv/.with-docs ## Build the documentation as a site in build/site, with every link checked (ARGS=serve shows it)
	@$(BIN)/mkdocs $(or $(ARGS),build) --strict

screenshots: .venv/.dev ## Make the pictures of the pages in docs/images anew (ARGS="task queues" picks some)
	@sh scripts/test-servers.sh chromium
	@$(BIN)/python scripts/screenshots.py $(ARGS)

bench: .venv/.dev ## Run every benchmark with a small number, for about a minute: a quick look
	@$(BIN)/python -m benchmarks.figures --quick $(ARGS)

bench-full: .venv/.dev ## Run every benchmark on every database, for about an hour, and write docs/explanation/figures.md (ARGS="--only poll")
	@$(BIN)/python -m benchmarks.figures --out docs/explanation/figures.md $(ARGS)

clean: ## Remove the virtual environment, caches, builds and the demo's data
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache dist build demo-data
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps: what was installed, and newer than what it was installed from.
.venv/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or later is needed; name one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@rm -rf .venv
	@$(PYTHON) -m venv .venv || { rm -rf .venv; echo "on Debian: apt-get install python3-venv" >&2; exit 1; }
	@touch $@

.venv/.runtime: pyproject.toml constraints.txt | .venv/.made
	@echo "installing into .venv ..."
	@$(BIN)/python -m pip install -q -c constraints.txt -e .
	@touch $@

.venv/.with-%: .venv/.runtime
	@echo "installing into .venv what $* needs ..."
	@$(BIN)/python -m pip install -q -c constraints.txt -e '.[$*]'
	@touch $@

.venv/.dev: pyproject.toml constraints.txt | .venv/.made
	@echo "installing into .venv, with the tools for development ..."
	@$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	@touch $@ .venv/.runtime
