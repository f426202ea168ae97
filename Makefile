# Every target makes what it needs on first use and is quick afterwards. `make help` lists them.
PYTHON ?= python3
BIN := .venv/bin
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
PYTEST := HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder
RUN := runs/demo-$(shell date +%Y%m%d-%H%M%S)
export TOKENIZERS_PARALLELISM := false
unexport PYTHONDONTWRITEBYTECODE  # or every process would compile all modules anew

.PHONY: help demo demo-full test test-slow check bench tutorials docs clean clean-runs
.DEFAULT_GOAL := help

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

demo: .venv/demo ## map one small language model to another on real text, and let the second go on with mapped states
	@$(BIN)/python -m aligners.cli.demo quick $(RUN)

demo-full: .venv/demo ## the same with eight maps, trained for longer; then two classifiers, trained on first use
	@$(BIN)/python -m aligners.cli.demo full $(RUN)

test: .venv/dev ## run the tests, but for those that take long
	$(PYTEST) -m "not slow"

test-slow: .venv/dev ## run the tests that take long: of several processes, whole studies and runs that are killed
	$(PYTEST) -m slow

check: .venv/dev ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: .venv/benchmarks ## run every benchmark and print its ratios
	@for script in benchmarks/[a-z]*.py; do \
		case $$script in */harness.py | */study_kills.py) continue;; esac; \
		echo; echo "$$script"; $(BIN)/python $$script || exit 1; \
	done

tutorials: .venv/docs ## run the tutorials whose code has changed, and keep their outputs for the site
	$(BIN)/python -m website.tutorials

docs: .venv/docs ## build the documentation site into build/site, which needs no network and no server
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

clean: ## remove the virtual environment; the runs stay
	rm -rf .venv

clean-runs: ## remove all runs, with their results
	rm -rf runs

# What is installed: the project itself with the extras that the target needs, at the tested versions. What pip says is
# shown where it fails; nobody can act on its warnings.
.venv/demo: EXTRAS := demo
.venv/dev: EXTRAS := demo,dev
.venv/benchmarks: EXTRAS := demo,benchmarks
.venv/docs: EXTRAS := demo,docs
.venv/demo .venv/dev .venv/benchmarks .venv/docs: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "Installing (once, a few minutes) ..."
	@{ $(PIP) "torch==2.13.0" && $(PIP) --editable ".[$(EXTRAS)]"; } > .venv/install.log 2>&1 \
		|| { cat .venv/install.log; exit 1; }
	@touch $@
