# Every target first makes the virtual environment it runs in, from pinned packages.

VENV ?= .venv
JOBS ?= 2
CONSTRAINTS ?= constraints.txt
PYTEST_ARGS ?=

BIN := $(VENV)/bin
READY := $(VENV)/.ready
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
BUILT_FROM := pyproject.toml constraints.txt \
  $(wildcard setup.py custom_calls/*.cc custom_calls/*.h custom_calls/*/*.cc custom_calls/*/*.h hlo_passes/*.h hlo_passes/*/*.cc hlo_passes/*/*.h memplan/*/*.cc memplan/*/*.h)

export PYTHON

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-slow test-hardware test-jax check docs package format bench constraints clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(READY) ## Plan Llamas for a TPU v5e and an H200, and run a small one here (2 minutes)
	@$(BIN)/memplan demo

test: $(READY) ## Run the tests (JOBS=2, PYTEST_ARGS="-k name")
	@$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not slow and not hardware" $(PYTEST_ARGS)

test-slow: $(READY) ## Run the tests marked slow
	@$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m slow $(PYTEST_ARGS)

# A copy of the tree has an environment and extensions of its own; its libtpu is that which goes
# with that jax.
test-jax: ## Run the tests with another jax (JAX=0.11.2), in build/
	$(if $(JAX),,$(error say with which: make test-jax JAX=0.11.2))
	@mkdir -p build/jax-$(JAX)
	@git ls-files -z --cached --others --exclude-standard \
	  | xargs -0 cp -p --parents -t build/jax-$(JAX)
	@sed -E -e '/^libtpu==/d' -e 's/^(jax|jaxlib|jax-cuda13-[a-z]+)==.*/\1==$(JAX)/' \
	  constraints.txt > build/jax-$(JAX)/jax.txt
	@$(MAKE) --no-print-directory -C build/jax-$(JAX) CONSTRAINTS=jax.txt .venv/.ready
	@build/jax-$(JAX)/.venv/bin/python -m pip --disable-pip-version-check install -q 'jax[tpu]==$(JAX)'
	@$(MAKE) --no-print-directory -C build/jax-$(JAX) test

test-hardware: $(READY) ## Run the kernels and plans on the GPU or TPU that is here
	@$(BIN)/python -m pytest -rs -m hardware $(PYTEST_ARGS)

check: $(READY) ## Check format, lint, types and layers
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/pyright --pythonpath $(BIN)/python
	@$(BIN)/pyright --pythonpath $(BIN)/python -p pyright.tests.json
	@$(BIN)/lint-imports --no-cache

docs: $(READY) ## Build the site into build/docs; a warning is an error
	@$(BIN)/python -m sphinx -W --keep-going -q -d build/doctrees docs build/docs

package: $(READY) ## Build sdist and wheel into dist/, and try the wheel in an empty environment
	@.ci/check-package

format: $(READY) ## Format, and fix what the linter can fix
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

bench: $(READY) ## Run the benchmarks
	@$(BIN)/python -m experiments.bench

constraints: ## Resolve every dependency afresh into constraints.txt
	@.ci/write-constraints

clean: ## Remove the environment and everything built
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	rm -f custom_calls/*.so custom_calls/*/*.so hlo_passes/*/*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The extensions are built here against the headers of the jaxlib they run with: jaxlib comes
# first and the build is not isolated. Where a compiler plugin has no package for the
# platform, the rest works and its tests are skipped.
$(READY): $(BUILT_FROM)
	@echo "memplan: setting up $(VENV)"
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null \
	  || { python="$$(.ci/find-python)" && "$$python" -m venv --clear $(VENV); }
	@$(PIP) install -q -c $(CONSTRAINTS) setuptools wheel jaxlib
	@$(PIP) install -q -c $(CONSTRAINTS) --no-build-isolation -e '.[dev,tpu,cuda,triton]' \
	  || { echo "memplan: setting up without the compilers of TPU, GPU and Triton"; \
	       $(PIP) install -q -c $(CONSTRAINTS) --no-build-isolation -e '.[dev]'; }
	@$(BIN)/python -c 'from importlib.util import find_spec as f; \
	  [print("memplan:", p, "has no package here; tests of that compiler are skipped") \
	   for p in ("libtpu", "jax_cuda13_plugin", "triton") if f(p) is None]'
	@touch $@
