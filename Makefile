# Everything a contributor types. Needs make and Python 3.11 to 3.14; uv is used where it is found.
# `make UV=` insists on pip, `make PYTHON=/path/to/python3.12` on one interpreter, ARGS="…" is passed on.

VENV := .venv
BIN := $(VENV)/bin
LOCK := requirements-dev.lock
IMAGE_LOCK := deploy/requirements.lock
BUILD_LOCK := deploy/build.lock
OLDEST := $(VENV)/oldest
OLDEST_LOCK := requirements-oldest.lock
# The plugin of anyio must fit the locked pytest, and the locked anyio needs newer typing-extensions.
NOT_OLDEST := anyio typing-extensions
OLDEST_EXTRAS := $(addprefix --extra ,dashboard django encryption fastapi flask otel reload sentry uvloop)
USE_DEPENDENCIES := tests/ownership $(addprefix tests/client/test_,enqueue.py jobs.py own_transactions.py) \
	$(addprefix tests/worker/test_,server_faults.py transactions.py) tests/stream tests/telemetry tests/contrib \
	tests/test_settings.py tests/test_contents.py
# What the statements do in PostgreSQL: test_sql_page.py shows that the lowest SQLAlchemy writes the same ones.
NOT_ON_OLDEST := $(addprefix --ignore=tests/ownership/test_,$(addsuffix .py,admission child_jobs claim_stale constraints \
	deadlocks enqueue_function expire failures guards operator_races outbox_and_control owner_races plans priorities prune \
	races registry repair reset reset_races settle_stalls waiting_keys waiting_keys_walk workflow_control workflow_plans \
	workflows)) --ignore=tests/telemetry/test_event_names.py --deselect=tests/contrib/test_django.py::TestCommands
# What reads and writes most of the tables.
USE_TABLES := $(addprefix tests/client/test_,enqueue.py jobs.py own_transactions.py) \
	$(addprefix tests/ownership/test_,late.py lives.py registry.py reset.py settle.py job_report.py) \
	$(addprefix tests/dashboard/test_,pages.py system_pages.py schedules.py workflows.py) \
	$(addprefix tests/worker/test_,older_schema.py server_faults.py transactions.py)
CHAOS := build/chaos.jsonl
KILLS := sigkill_child sigkill_parent sigkill_both sigkill_not_restarted sigkill_without_nats event_loop_block gil_hold

# uv reads no PIP_ variables: whoever says through them where packages come from gets pip.
UV := $(if $(filter PIP_CACHE_DIR PIP_CONFIG_FILE PIP_EXTRA_INDEX_URL PIP_FIND_LINKS PIP_INDEX_URL PIP_NO_INDEX,\
	$(.VARIABLES)),,$(shell command -v uv))

# A name on PATH may be a shim with nothing behind it, and some systems ship Python without ensurepip: ask by running.
PYTHON = python3.14 python3.13 python3.12 python3.11 python3
SUITABLE := $(if $(UV),,import venv; import ensurepip; )import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))

CREATE_VENV = $(if $(UV),$(UV) venv --quiet --clear --python $$python,$$python -m venv --clear) $(VENV)
INSTALL = $(if $(UV),$(UV) pip install --quiet --python $(BIN)/python,$(BIN)/python -m pip install --quiet)
# With the extras: for a requirement with an extra that no line names, pip takes the newest release, which has no hash.
COMPILE = UV_CUSTOM_COMPILE_COMMAND="make lock" $(or $(UV),$(BIN)/uv) pip compile --quiet \
	--universal --python-version 3.11 --generate-hashes --no-annotate --no-strip-extras

# As pip does, uv trusts the certificates that the system trusts.
export UV_SYSTEM_CERTS ?= 1
# And compiles what it installs: every process of the tests starts three times as fast.
export UV_COMPILE_BYTECODE ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK ?= 1
# Without bytecode each of the tests' hundreds of processes compiles everything anew.
unexport PYTHONDONTWRITEBYTECODE
MAKEFLAGS += --no-builtin-rules

.PHONY: help demo dev test check-oldest test-oldest cover check verify verify-quick chaos model bench bench-full docs dist fix lock clean
.DEFAULT_GOAL := help

help: ## Show this list.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' Makefile

demo: $(VENV)/.project ## Run real jobs on real servers, kill a worker, lose nothing. ARGS="REPO…" for other repositories.
	@PYTHONPATH=examples $(BIN)/python -m code_evolution $(ARGS)

dev: $(VENV)/.project ## Start NATS and PostgreSQL for development. ARGS="-- COMMAND…" runs a command with them.
	$(BIN)/jsworker dev $(ARGS)

# More processes than cores: tests wait for servers and for each other's processes more than they compute. Each
# begins with a part of the tests in their order, and takes from the others what they have not come to yet.
PYTEST = $(BIN)/pytest -n 7 --dist worksteal

test: $(VENV)/.project ## Run the tests, for two cores. ARGS="-k claim" for some of them.
	@$(PYTEST) $(ARGS)

# The lowest versions that pyproject.toml allows hide the locked ones.
ON_OLDEST = export PYTHONPATH="$$PWD/$(OLDEST)"

check-oldest: $(VENV)/.project $(OLDEST)/.installed ## Check types with the lowest versions of all dependencies.
	@$(ON_OLDEST); $(BIN)/python -c 'import sqlalchemy; print("== types with SQLAlchemy", sqlalchemy.__version__)'
	@$(ON_OLDEST); $(BIN)/mypy --cache-dir .mypy_cache/oldest

test-oldest: check-oldest ## Run tests with the lowest versions of all dependencies, and on the oldest schema.
	@$(ON_OLDEST); $(PYTEST) $(USE_DEPENDENCIES) $(NOT_ON_OLDEST) $(ARGS)
	@echo "== on the schema of the previous minor version"; ON_OLDEST_SCHEMA=1 $(PYTEST) $(USE_TABLES) $(ARGS)

cover: $(VENV)/.project ## Run the tests with coverage, of every process that they start, too.
	$(BIN)/pytest -n 2 --dist loadfile --cov --cov-report=term $(ARGS)

check: $(VENV)/.project ## Check format, lint, types, layers, spelling and known patterns of unsafe code.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports
	$(BIN)/codespell
	$(BIN)/bandit --quiet --configfile pyproject.toml --recursive jsworker benchmarks deploy examples

chaos: $(VENV)/.project ## Kill 1,000 processes, break everything else, publish what came of the jobs. About an hour.
	@mkdir -p $(dir $(CHAOS)) docs && rm -f $(CHAOS)
	$(BIN)/python -m tests.faults --kills 300 --every 2.4 --rate 20 --slowed 2 --json $(CHAOS) $(ARGS)
	$(BIN)/python -m tests.faults --kills 60 --every 6 --rate 20 --only $(KILLS) --json $(CHAOS)
	$(BIN)/python -m tests.faults --cluster --kills 10 --json $(CHAOS)
	$(BIN)/python -m tests.faults --only none --seconds 600 --json $(CHAOS)
	$(BIN)/python -m tests.faults --defaults --json $(CHAOS)
	$(BIN)/python -m tests.faults.limits --json $(CHAOS)
	$(BIN)/python -m tests.faults.schedules --json $(CHAOS)
	$(BIN)/python -m tests.faults.workflows --json $(CHAOS)
	$(BIN)/python -m benchmarks.limits --seconds 45 --json $(CHAOS)
	$(BIN)/python -m tests.faults.document $(CHAOS) docs/reliability.md

# One more than cores: the fault runs wait a fifth of the time. Not more: some judge how fast or how soon something was.
verify-quick: test-oldest ## Run what takes minutes: mutants, short fault runs, the guard of speed, the lowest dependencies.
	@$(BIN)/pytest -n 3 --dist worksteal -m thorough tests $(ARGS)

verify: verify-quick ## Check also what needs Debian packages: prometheus, pgbouncer, spin, gcc, nodejs, npm, chromium and chromium-driver.
	$(BIN)/pytest -m verify tests $(ARGS)
	$(BIN)/python model/check.py

model: $(VENV)/.project ## Check the model of the ownership protocol with spin (Debian packages: spin gcc).
	$(BIN)/python model/check.py $(ARGS)

bench: $(VENV)/.project ## Measure throughput, enqueueing and latency beside the peers. 15 minutes. ONLY=e,h for other measures.
	$(BIN)/python -m benchmarks $(if $(ONLY),--only $(ONLY)) --json docs/benchmarks.json --chart docs $(ARGS)
	$(BIN)/python -m benchmarks.document docs/benchmarks.json docs/performance.md

bench-full: $(VENV)/.project ## Measure everything: growth, costs, memory, PgBouncer (Debian package: pgbouncer), retention, flow control. Over an hour.
	$(BIN)/pytest -m slow tests/benchmarks
	$(BIN)/python -m benchmarks --full --json docs/benchmarks.json --chart docs $(ARGS)
	$(BIN)/python -m benchmarks.document docs/benchmarks.json docs/performance.md

docs: $(VENV)/.project ## Build the documentation site into build/site, every link checked. ARGS=serve shows it while you write.
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs $(or $(ARGS),build --strict --quiet)

# Hatchling writes this time into the archives: the same commit gives the same bytes.
dist: export SOURCE_DATE_EPOCH ?= $(shell git log -1 --format=%ct)
dist: $(VENV)/.project ## Build wheel and sdist into dist/, and their bill of materials into build/, the same bytes each time.
	rm -rf dist
	$(BIN)/python -m build --no-isolation .
	@mkdir -p build
	$(BIN)/cyclonedx-py requirements $(IMAGE_LOCK) --pyproject pyproject.toml --output-reproducible \
		--output-file build/jsworker.cdx.json

fix: $(VENV)/.project ## Format, and repair what the linter can repair.
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lock: $(if $(UV),,$(VENV)/.dependencies) ## Write the locks anew after a change of dependencies. ARGS=--upgrade for newer versions.
	$(if $(UV),,@test -x $(BIN)/uv || $(INSTALL) uv)
	$(COMPILE) pyproject.toml --extra dev --output-file $(LOCK) $(ARGS)
	$(COMPILE) pyproject.toml --extra uvloop --extra dashboard --constraint $(LOCK) --output-file $(IMAGE_LOCK)
	$(COMPILE) deploy/build.in --constraint $(LOCK) --output-file $(BUILD_LOCK)
	$(COMPILE) pyproject.toml $(OLDEST_EXTRAS) --resolution lowest-direct $(addprefix --no-emit-package ,$(NOT_OLDEST)) \
		--output-file $(OLDEST_LOCK)

clean: ## Remove everything that can be made again, .venv too.
	rm -rf $(VENV) build dist htmlcov .coverage .coverage.* .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.dependencies: $(LOCK)
	@echo "installing the locked dependencies into $(VENV) with $(if $(UV),uv,pip); this takes a minute the first time"
	@for python in $(PYTHON); do \
		$$python -c '$(SUITABLE)' >/dev/null 2>&1 || continue; \
		exec $(CREATE_VENV); \
	done; \
	echo "no Python 3.11 to 3.14$(if $(UV),, with venv and ensurepip) found (tried: $(PYTHON)); name one: make PYTHON=PATH" >&2; \
	exit 1
	@$(INSTALL) --require-hashes --requirement $(LOCK)
	@touch $@

$(VENV)/.project: pyproject.toml $(VENV)/.dependencies
	@$(INSTALL) --no-deps --no-build-isolation --editable .
	@touch $@

$(OLDEST)/.installed: $(OLDEST_LOCK) $(VENV)/.dependencies
	@rm -rf $(OLDEST)
	@$(INSTALL) --no-deps --require-hashes --target $(OLDEST) --requirement $(OLDEST_LOCK)
	@touch $@
