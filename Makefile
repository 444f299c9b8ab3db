# Everything runs in .venv, which is made on first use. See CONTRIBUTING.md.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
OLD_VENV := .venv-transformers4
OLD_INSTALLED := $(OLD_VENV)/.installed
PIP := install --quiet --disable-pip-version-check
DEMO_OUT := demo-out
ARGS ?=

.PHONY: demo test test-transformers4 test-wheel lint format bench browser clean

demo: $(INSTALLED)  ## record the sample model, print, report, serve (ARGS=--no-serve ends by itself)
	rm -rf $(DEMO_OUT)
	$(BIN)/routeprof demo --out $(DEMO_OUT) $(ARGS)

test: $(INSTALLED) browser  ## all tests; those that need a browser skip where there is none
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

test-transformers4: $(INSTALLED) $(OLD_INSTALLED)  ## the hooks on transformers 4.57
	ROUTEPROF_TRANSFORMERS_4=$(abspath $(OLD_VENV)/bin/python) \
		$(BIN)/python -m pytest tests/hooks -k transformers_4 $(ARGS)

test-wheel: $(INSTALLED)  ## build the wheel, install it elsewhere, use it there
	PYTHON=$(PYTHON) BIN=$(abspath $(BIN)) tests/wheel.sh

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(INSTALLED)  ## what capture costs, as ratios measured in one run
	$(BIN)/python -W ignore -m tests.bench.capture $(ARGS)

browser:
	@command -v chromium >/dev/null || { \
		test "$$(id -u)" = 0 && command -v apt-get >/dev/null && \
		apt-get update -qq && apt-get install -y -qq chromium >/dev/null; \
	} || echo "Chromium is not here and cannot be installed: browser tests will be skipped"

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip $(PIP) --upgrade pip
	$(BIN)/pip $(PIP) -c constraints.txt -e '.[all,test,lint]'
	touch $@

$(OLD_INSTALLED): constraints.txt
	$(PYTHON) -m venv $(OLD_VENV)
	$(OLD_VENV)/bin/pip $(PIP) --upgrade pip
	$(OLD_VENV)/bin/pip $(PIP) torch==2.13.0 transformers==4.57.1 pandas pyarrow typer rich
	$(OLD_VENV)/bin/pip $(PIP) --no-deps -e .
	touch $@

clean:
	rm -rf $(VENV) $(OLD_VENV) $(DEMO_OUT) build dist *.egg-info
