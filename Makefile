# make demo   train GCN, GraphSAGE and GIN with and without gnnfast, side by side
# make test   the tests, of those with many cases a part
# make test-all   all cases
# make docs   the documentation, in docs/_build/html
# make release   what is uploaded, in dist (CONTRIBUTING.md)
# They need Python >= 3.10, a C++ compiler and make; everything else is installed into .venv. Set TORCH to use another torch
# (TORCH="torch==2.10.0", or a path to a wheel), PYTHON for another interpreter. With nvcc and a CUDA torch the CUDA library is
# built as well.

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
BIN := $(VENV)/bin
SOURCES := $(shell find plugin_src gnnfast -type f -not -name '*.pyc') pyproject.toml
PYG := torch_geometric>=2.6
# PyPI has DGL for Python up to 3.12 only; without it its tests are skipped.
DGL := $(shell $(PYTHON) -c "import sys; print('dgl==2.1.0 packaging pandas' if sys.version_info < (3, 13) else '')")

.PHONY: demo test test-all install lint docs release clean

test test-all: $(VENV)/installed
	OMP_WAIT_POLICY=passive $(BIN)/pytest -n auto $(if $(filter test,$@),--fewer) # waiting threads of workers must not spin

demo: $(VENV)/installed
	$(BIN)/python benchmarks/demo/run.py

install: $(VENV)/installed

lint: $(VENV)/installed
	$(BIN)/pip install -q ruff mypy clang-format
	$(BIN)/ruff check gnnfast integration_tests benchmarks docs examples
	$(BIN)/ruff format --check gnnfast integration_tests benchmarks docs examples
	$(BIN)/mypy
	find plugin_src -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' | xargs $(BIN)/clang-format --dry-run -Werror

docs: $(VENV)/installed
	$(BIN)/pip install -q --disable-pip-version-check "sphinx>=8" furo "myst-parser>=4"
	$(BIN)/sphinx-build -q -W --keep-going docs docs/_build/html

release: $(VENV)/installed
	.ci/release

$(VENV)/packages:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check "$(TORCH)"
	$(BIN)/pip install -q --disable-pip-version-check "$(PYG)" $(DGL) "scikit-build-core>=0.10" "cmake>=3.24" ninja numpy scipy \
		"pytest>=8" pytest-xdist "wrapt>=1.16" "rich>=13"
	touch $@

# A torch without CUDA cannot use the CUDA library, so it is not built for it.
$(VENV)/installed: $(VENV)/packages $(SOURCES)
	CMAKE_ARGS="$$($(BIN)/python -c 'import torch; print("" if torch.version.cuda else "-DGNNFAST_CUDA=OFF")') $$CMAKE_ARGS" \
		$(BIN)/pip install -q --disable-pip-version-check --no-build-isolation --no-deps --force-reinstall .
	touch $@

clean:
	rm -rf $(VENV) build
