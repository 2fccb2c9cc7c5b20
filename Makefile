# Two commands matter: `make quickstart` and `make test`. Both do all their own set-up; `make env` does nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# SYSTEM_TORCH=1 builds the environment on top of a torch that is already installed (GPU images).
SYSTEM_TORCH ?= 0
PIP_INSTALL = $(BIN)/pip install --quiet --disable-pip-version-check
ifeq ($(SYSTEM_TORCH),1)
VENV_FLAGS := --system-site-packages
else
PIP_INSTALL += -c constraints.txt
endif

.PHONY: quickstart env test parity lint docs bench clean

quickstart: $(VENV)/.run
	$(BIN)/python tools/quickstart.py

env: $(VENV)/.run
	@echo "$(VENV) is ready; '. $(VENV)/bin/activate' puts its python and torchrun first"

test: $(VENV)/.dev lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PYTEST_ARGS)

# Every layout against one process; CI runs a covering subset of it.
parity: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python tests/parity_matrix.py $(PARITY_ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python tools/gen_docs.py --check

docs: $(VENV)/.run
	$(BIN)/python tools/gen_docs.py

bench: $(VENV)/.dev
	$(BIN)/python benchmarks/cast_speed.py
	$(BIN)/python benchmarks/fp8_linear.py
	$(BIN)/python benchmarks/train_step.py

# torch goes first: a package that depends on it would otherwise choose its own build.
$(VENV)/.torch: constraints.txt
	$(PYTHON) -m venv $(VENV_FLAGS) $(VENV)
	$(PIP_INSTALL) torch numpy
	touch $@

$(VENV)/.run: $(VENV)/.torch pyproject.toml
	$(PIP_INSTALL) -e ".[fast,hf,plot]"
	touch $@

# One test looks at a page in a browser; it is skipped where there is none and none can be installed.
BROWSERS := chromium chromium-browser google-chrome google-chrome-stable
APT := timeout 180 apt-get -qq -o=Dpkg::Use-Pty=0
$(VENV)/.dev: $(VENV)/.torch pyproject.toml
	$(PIP_INSTALL) -e ".[fast,hf,plot,test,dev]"
	@for name in $(BROWSERS); do command -v $$name > /dev/null && exit 0; done; \
	  test "$$(id -u)" = 0 && command -v apt-get > /dev/null && export DEBIAN_FRONTEND=noninteractive && \
	  { $(APT) update; $(APT) install -y --no-install-recommends chromium fonts-dejavu-core; } > /dev/null 2>&1 || \
	  echo "no browser: the test that looks at the FP8 report in one will be skipped"
	touch $@ $(VENV)/.run

clean:
	rm -rf $(VENV) quickstart build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
