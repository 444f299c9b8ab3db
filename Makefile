# Everything runs in .venv, which is made on first use. See CONTRIBUTING.md.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
OLD_VENV := .venv-transformers4
OLD_INSTALLED := $(OLD_VENV)/.installed
VLLM_VENV := .venv-vllm
SGLANG_VENV := .venv-sglang
PIP := install --quiet --disable-pip-version-check
DEMO_OUT := demo-out
ARGS ?=

.PHONY: demo test test-kills test-transformers4 test-vllm test-sglang engines test-gpu test-wheel lint format
.PHONY: bench bench-audit bench-placement bench-vllm bench-dashboard soak screenshots programs clean

demo: $(INSTALLED)  ## record the sample model, print, report, serve (ARGS=--no-serve ends by itself)
	rm -rf $(DEMO_OUT)
	$(BIN)/routeprof demo --out $(DEMO_OUT) $(ARGS)

test: $(INSTALLED) programs  ## all tests; those that need Chromium or Prometheus skip without
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

test-kills: $(INSTALLED)  ## 200 recording processes, killed at random moments
	ROUTEPROF_KILLS=200 $(BIN)/python -m pytest tests/capture/test_killed.py $(ARGS)

test-transformers4: $(INSTALLED) $(OLD_INSTALLED)  ## the hooks on transformers 4.57
	ROUTEPROF_TRANSFORMERS_4=$(abspath $(OLD_VENV)/bin/python) \
		$(BIN)/python -m pytest tests/hooks -k transformers_4 $(ARGS)

test-vllm:  ## the vLLM plugin in real engines on the CPU; builds .venv-vllm (3.5 GB)
	PYTHON=$(PYTHON) tests/vllm/environment.sh $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pytest tests/vllm $(ARGS)

test-sglang:  ## the SGLang plugin in real engines on the CPU; builds .venv-sglang (3.5 GB)
	PYTHON=$(PYTHON) tests/sglang/environment.sh $(SGLANG_VENV)
	$(SGLANG_VENV)/bin/python -m pytest tests/sglang $(ARGS)

engines:  ## what these two need besides this package: minutes to fetch
	PYTHON=$(PYTHON) tests/sglang/environment.sh $(SGLANG_VENV) engine
	PYTHON=$(PYTHON) tests/vllm/environment.sh $(VLLM_VENV) engine

test-gpu: $(INSTALLED)  ## what only a CUDA device can show; skips where there is none
	PYTHON=$(BIN)/python tests/gpu/run.sh

test-wheel: $(INSTALLED)  ## build the wheel, install it elsewhere, use it there
	PYTHON=$(PYTHON) BIN=$(abspath $(BIN)) tests/wheel.sh

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(INSTALLED) programs  ## all benchmarks but vLLM's (ARGS='capture fold' chooses): what changed, and docs/benchmarks.md
	$(BIN)/python -W ignore -m tests.bench $(ARGS)

bench-placement bench-audit bench-dashboard: bench-%: $(INSTALLED) programs  ## one of them, with its own ARGS
	$(BIN)/python -W ignore -m tests.bench $* $(ARGS)

soak: $(INSTALLED)  ## record for 30 minutes (ARGS='--minutes 5') and look for what grows
	$(BIN)/python -W ignore -m tests.soak $(ARGS)

screenshots: $(INSTALLED) programs  ## pictures of every view for docs/dashboard.md
	$(BIN)/python -m tests.dashboards.screenshots docs/images

bench-vllm:  ## throughput of vLLM with and without routeprof, as ratios measured in one run
	PYTHON=$(PYTHON) tests/vllm/environment.sh $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m tests.vllm.bench $(ARGS)

programs:
	@{ command -v chromium && command -v prometheus; } >/dev/null || { \
		test "$$(id -u)" = 0 && command -v apt-get >/dev/null && \
		apt-get update -qq && apt-get install -y -qq chromium prometheus >/dev/null; \
	} || echo "Chromium or Prometheus cannot be installed: tests that need them will be skipped"

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
	rm -rf $(VENV) $(OLD_VENV) $(VLLM_VENV) $(SGLANG_VENV) $(DEMO_OUT) build dist *.egg-info
