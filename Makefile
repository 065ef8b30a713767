# The verbs of the project. `make` alone lists them; each sets up what it needs in .venv.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV  := .venv
BIN   := $(VENV)/bin
STAMP := $(VENV)/.installed
SEED  ?= 1
JOBS  ?= 2
ARGS  ?=

# Tests start the product by the hundred: not each process is to compile its sources anew.
unexport PYTHONDONTWRITEBYTECODE

NATIVE_SOURCES := $(wildcard src/trunkline/native/cpp/*)

.PHONY: help setup check format test test-vllm models nightly charts site serve demo demo-vllm bench sim faults sim-night chaos golden docs clean

help: ## List the verbs
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1|\2/' | column -t -s '|'

setup: $(STAMP) ## Make .venv and install trunkline in it, editable; builds the native core if it can
	@$(BIN)/python -c 'import trunkline.native as n; \
	  print("trunkline is ready in $(VENV); native core:", n.IMPLEMENTATION); \
	  n.IMPLEMENTATION == "pure" and print("(%s: Python does the work, slower)" \
	    % (n.STALE_CORE or "no C++20 compiler was found"))'

$(STAMP): pyproject.toml CMakeLists.txt $(NATIVE_SOURCES)
	@python=''; \
	for candidate in $(PYTHON) python3 python3.14 python3.13 python3.12 python3.11; do \
	  if $$candidate -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then \
	    python=$$candidate; break; fi; \
	done; \
	if [ -z "$$python" ]; then \
	  echo 'trunkline needs Python 3.11 or newer, and none is on PATH.' >&2; \
	  echo 'Install one, or name it: make setup PYTHON=/path/to/python3.11' >&2; exit 1; fi; \
	if ! $$python -c 'import venv, ensurepip' >/dev/null 2>&1; then \
	  echo "$$python has no venv module. Remedy: apt install python3-venv" >&2; exit 1; fi; \
	echo 'Setting up $(VENV) with trunkline, its tools and its native core: about a minute, once.'; \
	[ -x $(BIN)/python ] && $(BIN)/python -c 'import pip' 2>/dev/null || $$python -m venv --clear $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev,report]'
	@touch $@

check: $(STAMP) ## Format, lint, types, the shape of the tree, and generated pages
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/mypy
	$(BIN)/pytest -q tests/unit/test_tree.py
	$(BIN)/trunkline docs --check

format: $(STAMP) ## Rewrite the sources in the project's format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

test: $(STAMP) ## All tests; ARGS='-k name' narrows
	$(BIN)/pytest -n $$(($(JOBS) + 1)) --dist loadfile $(ARGS)  # half of them wait for a process

test-vllm: $(STAMP) ## Before two real vLLM engines on the CPU, in .venv-vllm or where VLLM_PYTHON says
	@python=$$($(BIN)/python tools/vllm_environment.py); if [ -n "$$python" ]; then \
	  VLLM_PYTHON=$$python $(BIN)/pytest -n 0 -o faulthandler_timeout=1500 tests/vllm $(ARGS); fi

models: $(STAMP) ## Leases, revocation and the exit fence in every state, and what breaks them, with figures
	$(BIN)/pytest -q tests/model/test_revocation_model.py tests/model/test_fence_model.py \
	  tests/sim/test_revocation_schedules.py $(ARGS)

nightly: $(STAMP) ## What takes long or is timed: 10,000 pairs of runs, the models, who can tell tenants by the clock
	PAIRS=10000 $(BIN)/pytest -n $(JOBS) tests/sim/test_non_interference.py $(ARGS)
	$(BIN)/pytest -m nightly tests
	$(MAKE) models
	$(BIN)/python benchmarks/distinguisher.py

serve: $(STAMP) ## A gateway with simulated workers on this machine, until Ctrl-C
	$(BIN)/trunkline demo --serve $(ARGS)

demo: $(STAMP) ## The tour: what the gateway does, on simulated workers
	$(BIN)/trunkline demo $(ARGS)

demo-vllm: $(STAMP) ## A short replay before two real vLLM engines on the CPU, in .venv-vllm or where VLLM_PYTHON says
	$(BIN)/python tools/vllm_demo.py $(ARGS)

bench: $(STAMP) ## Every published number; JSON=1 writes out/bench/*.json; fails at the end if a bar was missed
	@mkdir -p out/bench
	@bad=''; \
	for script in benchmarks/*.py; do \
	  name=$$(basename $$script .py); echo "== $$name"; \
	  if [ -n "$(JSON)" ]; then $(BIN)/python $$script --json > out/bench/$$name.json; \
	  else $(BIN)/python $$script; fi || bad="$$bad $$name"; \
	done; \
	if [ -n "$$bad" ]; then echo "missed a bar, or broke:$$bad" >&2; exit 1; fi

sim: $(STAMP) ## The fleet model on a real trace; SEED=1
	$(BIN)/trunkline simulate W1 --seed $(SEED) $(ARGS)

chaos: $(STAMP) ## Faults on real processes, each against its goal; ARGS='--only F1,F2 --trials 20'
	$(BIN)/python tests/chaos/chaos.py $(ARGS)

faults: $(STAMP) ## Gateway, control and workers under drawn faults, on a virtual clock; SEED=1 or SEED=0-199
	@PYTHONPATH=tests:tests/sim $(BIN)/python -m faults.runs $(SEED) --jobs $(JOBS) $(ARGS)

sim-night: $(STAMP) ## The same for 10,000 seeds, with the rare states that they must reach
	@PYTHONPATH=tests:tests/sim $(BIN)/python -m faults.runs 0-9999 --jobs $(JOBS) --rare 60 $(ARGS)

golden: $(STAMP) ## Write the golden transcripts anew; the diff is the review
	GOLDEN=write $(BIN)/pytest -q tests/scenario

docs: $(STAMP) ## Write the generated reference pages anew
	$(BIN)/trunkline docs

charts: $(STAMP) ## Render deploy/kubernetes from the Helm chart anew, and test what is in deploy/
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[charts]'
	$(BIN)/python tools/render_chart.py
	$(BIN)/pytest -q tests/unit/test_deploy_files.py tests/unit/test_deploy_chart.py $(ARGS)

site: $(STAMP) ## Build the docs site into site/; fails on a broken link
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo 'Open site/index.html'

clean: ## Remove .venv and everything that was built
	rm -rf $(VENV) $(VENV)-vllm build dist out site .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find src tests benchmarks tools -name __pycache__ -type d -prune -exec rm -rf {} +
