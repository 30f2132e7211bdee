# make demo | test | test-all | tutorials | bench | docs | lint
#
# PYTHON           interpreter; the default one installs into .venv, any other into .venv-<its name>
# ONLY_SLOW=1      test-all leaves out the tests that `make test` runs
# PYTEST_WORKERS   processes of the test suite, one thread each
# PYTEST_ARGS      more arguments of pytest

# A shim may be on the path and still refuse to run, so the interpreter is asked rather than looked up.
DEFAULT_PYTHON := $(shell python3.11 -c 'print("python3.11")' 2>/dev/null || echo python3)
PYTHON ?= $(DEFAULT_PYTHON)
ifeq ($(PYTHON),$(DEFAULT_PYTHON))
VENV ?= .venv
else
VENV ?= .venv-$(shell $(PYTHON) -c 'import sys; print("python%d.%d" % sys.version_info[:2])')
endif

BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --constraint constraints.txt
PYTEST_WORKERS ?= 2
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(PYTEST_WORKERS) --dist loadfile $(PYTEST_ARGS)
TUTORIALS := $(wildcard tutorials/*.ipynb)

.PHONY: demo test test-all tutorials bench docs lint
.DELETE_ON_ERROR:

demo: $(VENV)/.installed
	$(BIN)/alphastomics demo --output-dir demo

test: $(VENV)/.installed-test
	$(PYTEST) --dist worksteal -m "not slow"

test-all: $(VENV)/.installed-test
	$(PYTEST) --durations=25 $(if $(ONLY_SLOW),-m slow)
	$(if $(TUTORIALS),$(PYTEST) --nbmake --nbmake-timeout=1200 $(TUTORIALS))

# Run the tutorials on real tissues and store their outputs.
tutorials: $(VENV)/.installed-test
	$(PYTEST) --nbmake --nbmake-timeout=1200 --overwrite $(shell grep -l ALPHASTOMICS_DATA $(TUTORIALS))

bench: $(VENV)/.installed-test
	$(BIN)/python -m benchmarks

docs: $(VENV)/.installed-doc
	$(BIN)/python -m sphinx -M html docs docs/_build -W --keep-going

lint: $(VENV)/.installed-lint
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(PIP_INSTALL) --editable ".[dask,hub,ot,spatialdata]"
	touch $@

$(VENV)/.installed-%: $(VENV)/.installed
	$(PIP_INSTALL) --group $*
	touch $@
