# Every target makes what it needs: a virtual environment in .venv from any Python >= 3.12, and
# an editable install that is built again when a C++ file or the build configuration changes.
SHELL := /bin/bash
VENV := .venv
# The compilers of `cokernel aot`; a virtual environment without Cokernel.
AOT_VENV := .venv-aot
PYTHON_IN_VENV := $(VENV)/bin/python
RUNTIME_SOURCES := $(wildcard src/cokernel/runtime/*.cc src/cokernel/runtime/*.h \
                              src/cokernel/runtime/checked/*.cc src/cokernel/runtime/checked/*.h)
CXX_SOURCES := $(RUNTIME_SOURCES) $(wildcard tests/runtime/*.cc tests/runtime/*.h benchmarks/*.cc benchmarks/*.h)
PIP := $(PYTHON_IN_VENV) -m pip --disable-pip-version-check
PYTEST_ARGS ?=
BENCH_ARGS ?=

# Make's own default for CXX is g++, which the compiler check must not mistake for a wish.
ifeq ($(origin CXX),default)
  CXX :=
endif
export CXX PYTHON

.PHONY: help build demo test test-aot lint format bench sanitize clean
.DELETE_ON_ERROR:

help:
	@echo "make demo      build, and run one kernel of three programs on real input"
	@echo "make test      build, and run the tests           (PYTEST_ARGS='-k name')"
	@echo "make test-aot  install the vendors' compilers apart, and compile kernels for their chips"
	@echo "make lint      ruff, mypy and clang-format"
	@echo "make format    let ruff and clang-format rewrite the sources"
	@echo "make bench     build, and run the benchmarks       (BENCH_ARGS='--json FILE')"
	@echo "make sanitize  the runtime's own tests under the address and thread sanitizers"
	@echo "make build     only build"
	@echo "make clean     remove builds and caches, not .venv"

build: $(VENV)/.installed

demo: build
	$(PYTHON_IN_VENV) -m cokernel demo

test: build
	$(PYTHON_IN_VENV) -m pytest $(PYTEST_ARGS)

test-aot: build $(AOT_VENV)/.installed
	COKERNEL_AOT_PYTHON=$(abspath $(AOT_VENV))/bin/python $(PYTHON_IN_VENV) -m pytest tests/aot $(PYTEST_ARGS)

lint: $(VENV)/.tools
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/clang-format --dry-run --Werror $(CXX_SOURCES)

format: $(VENV)/.tools
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
	$(VENV)/bin/clang-format -i $(CXX_SOURCES)

bench: build
	@# All are run, whatever the first finds: a missed goal of any is a failure at the end.
	@status=0; \
	$(PYTHON_IN_VENV) benchmarks/run.py $(BENCH_ARGS) || status=$$?; \
	$(PYTHON_IN_VENV) benchmarks/compile_time.py || status=$$?; \
	$(PYTHON_IN_VENV) benchmarks/checked.py || status=$$?; \
	exit $$status

sanitize: $(VENV)/.tools
	scripts/sanitize.sh $(PYTHON_IN_VENV)

clean:
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache $(VENV)/.installed
	find . -name __pycache__ -not -path './.venv*/*' -prune -exec rm -rf {} +

# An environment that works is kept, whoever made it; one whose Python is gone is made again.
$(VENV)/.created: scripts/make_venv.sh
	@scripts/make_venv.sh $(VENV)
	@touch $@

# Everything but Cokernel itself: what builds it, what it imports, and the developer's tools.
$(VENV)/.tools: $(VENV)/.created pyproject.toml
	$(PIP) install --quiet --upgrade 'pip>=25.1'
	$(PIP) install --quiet --group build $$($(PYTHON_IN_VENV) scripts/requirements.py)
	@touch $@

# The compilers have to be of the same release as the JAX that lowers kernels for them.
$(AOT_VENV)/.installed: $(VENV)/.tools scripts/make_aot_venv.sh pyproject.toml
	@scripts/make_aot_venv.sh $(AOT_VENV) $(PYTHON_IN_VENV)
	@touch $@

$(VENV)/.installed: $(VENV)/.tools CMakeLists.txt $(RUNTIME_SOURCES)
	@scripts/check_compiler.sh >/dev/null
	$(PIP) install --quiet --no-build-isolation --no-deps --editable .
	@touch $@
