# `make help` lists the targets. They work in .venv, made as it is needed.

PYTHON ?= python3
BAZEL ?= $(shell command -v bazel-4 || command -v bazel || echo bazel)

VENV := .venv
RUN := $(VENV)/bin/python
PIP := $(RUN) -m pip --disable-pip-version-check -qq

export TF_CPP_MIN_LOG_LEVEL ?= 2
# tensorflow_recommenders, the peer of tests and examples, needs Keras 2.
export TF_USE_LEGACY_KERAS := 1

.DEFAULT_GOAL := help
.PHONY: help setup demo multi-worker dlrm test upstream lint format bench
.PHONY: wheel bazel clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' \
		$(MAKEFILE_LIST)

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
		echo "$(PYTHON) is not Python 3.10 or newer: make PYTHON=..." >&2; \
		exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --upgrade pip
	@touch $@

# One stamp per extra of setup.py.
$(VENV)/.installed-%: $(VENV)/.created setup.py pyproject.toml
	$(PIP) install --editable '.[$*]'
	@touch $@

# Only MovieLens-100K's files are read from it, so it comes without PyTorch.
$(VENV)/.movielens: $(VENV)/.created
	$(PIP) install --no-deps recbole==1.2.1
	@touch $@

setup: $(VENV)/.installed-dev ## Make .venv with everything for development

demo: $(VENV)/.installed-examples $(VENV)/.movielens ## Train on MovieLens-100K
	$(RUN) examples/movielens_ranking.py

# Two processes, as on a cluster; ARGS="--workers 3" and other flags.
multi-worker: $(VENV)/.installed-examples $(VENV)/.movielens
multi-worker: ## Train on MovieLens-100K with several workers
	$(RUN) examples/multi_worker.py $(ARGS)

# One process, two replicas; ARGS="--rows 1000000" and other flags.
dlrm: $(VENV)/.installed-examples ## Train a DLRM on synthetic clicks
	$(RUN) examples/dlrm_synthetic.py $(ARGS)

test: $(VENV)/.installed-test ## Run the tests; ARGS="-k ragged" picks some
	$(RUN) -m pytest -n 2 $(ARGS)

upstream: $(VENV)/.installed-test ## Run TFRS's and TF-models' tests on it
	$(RUN) tests/upstream/run.py

lint: $(VENV)/.installed-lint ## Check style and types
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

format: $(VENV)/.installed-lint ## Bring the code into style
	$(RUN) -m ruff check --fix-only .
	$(RUN) -m ruff format .

bench: $(VENV)/.installed-test ## Compare speed with TFRS and Keras
	$(RUN) benchmarks/single_table.py
	$(RUN) benchmarks/sharded.py

WHEEL_CHECK := import sys, tfrs_embed; \
	assert "tensorflow_recommenders" not in sys.modules; \
	print("imported", tfrs_embed.__version__, "from", tfrs_embed.__file__)

# .build goes first: modules since removed would still be taken from it.
wheel: $(VENV)/.created ## Build dist/*.whl and import it in an empty venv
	rm -rf .build dist
	$(PIP) wheel --no-deps --wheel-dir dist .
	tmp=$$(mktemp -d) && trap 'rm -rf "$$tmp"' EXIT && \
	$(RUN) -m venv "$$tmp/venv" && \
	"$$tmp/venv/bin/python" -m pip install -qq --no-compile dist/*.whl && \
	cd "$$tmp" && env -i venv/bin/python -c '$(WHEEL_CHECK)'

bazel: $(VENV)/.installed-test ## Build and test with Bazel, in .venv
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" && \
	$(BAZEL) $(BAZEL_STARTUP) build //... && \
	$(BAZEL) $(BAZEL_STARTUP) test $(BAZEL_ARGS) //...

clean: ## Remove what these targets made, .venv too
	rm -rf $(VENV) .build dist *.egg-info
	rm -rf .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +
