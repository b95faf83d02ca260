# `make help` lists the targets. They work in .venv, made as it is needed.

PYTHON ?= python3
BAZEL ?= $(shell command -v bazel-4 || command -v bazel || echo bazel)

VENV := .venv
BENCH_VENV := .venv-bench
TPU_VENV := .venv-tpu
COMPILER_VENV := .venv-tpu-compiler
OLDEST_VENV := .venv-oldest
WHEELS_VENV := .venv-wheels
RUN := $(VENV)/bin/python
PIP := $(RUN) -m pip --disable-pip-version-check -qq

export TF_CPP_MIN_LOG_LEVEL ?= 2
# tensorflow_recommenders, the peer of tests and examples, needs Keras 2.
export TF_USE_LEGACY_KERAS := 1
# Tests start hundreds of processes: none is to compile all modules again.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help setup kernels demo distributed keras3 multi-worker dlrm tpu streaming serve test docs
.PHONY: notebooks sequences semantic-ids
.PHONY: test-tools test-more nightly faults mutation test-oldest test-clusters test-tpu-wheel test-tpu-vm test-tpu-compile tpu-support sanitize upstream tutorials lint format bench results wheel
.PHONY: wheels bazel clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "make %-14s %s\n", $$1, $$2}' \
		$(MAKEFILE_LIST)

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
		echo "$(PYTHON) is not Python 3.10 or newer: make PYTHON=..." >&2; \
		exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --upgrade pip
	@touch $@

# One stamp per extra of setup.py. What recbole lacks, below, is no conflict.
$(VENV)/.installed-%: $(VENV)/.created setup.py pyproject.toml
	$(PIP) install --no-warn-conflicts --editable '.[$*]'
	@touch $@

# Only MovieLens-100K's files are read from it, so it comes without PyTorch.
$(VENV)/.movielens: $(VENV)/.created
	$(PIP) install --no-deps recbole==1.2.1
	@touch $@

# Installed, and the kernels compiled for what that brought, if they can be.
KERNELS := $(wildcard tfrs_embed/kernels/cc/*) tfrs_embed/kernels/build.py
$(VENV)/.ready-%: $(VENV)/.installed-% $(KERNELS)
	$(RUN) -m tfrs_embed.kernels.build --if-possible
	@touch $@
# What only leads from one pattern to another would be deleted.
.PRECIOUS: $(VENV)/.installed-%

setup: $(VENV)/.ready-dev ## Make .venv with everything for development

kernels: $(VENV)/.installed-test ## Compile the CPU kernels, or say why not
	$(RUN) -m tfrs_embed.kernels.build

# KERAS=3 for a model of Keras 3.
# ARGS="--table-dtype bfloat16" and other flags.
demo: $(VENV)/.ready-examples $(VENV)/.movielens ## Train on MovieLens-100K
	TF_USE_LEGACY_KERAS=$(if $(filter 3,$(KERAS)),0,1) \
		$(RUN) examples/movielens_ranking.py $(ARGS)

# ARGS="retrieval" for one; ARGS=--html for pages beside the .ipynb files.
notebooks: $(VENV)/.ready-notebooks $(VENV)/.movielens
notebooks: ## Execute the notebooks; examples/notebooks/executed has the outputs
	$(RUN) examples/notebooks/run.py $(ARGS)

# ARGS="--strategy mirrored:2" and other flags.
distributed: $(VENV)/.ready-examples $(VENV)/.movielens
distributed: ## Train DistributedEmbedding on MovieLens-100K
	$(RUN) examples/movielens_distributed_embedding.py $(ARGS)

# ARGS="--strategy mirrored:2" and other flags.
keras3: $(VENV)/.ready-examples $(VENV)/.movielens
keras3: ## Train a model of Keras 3 on MovieLens-100K
	TF_USE_LEGACY_KERAS=0 $(RUN) examples/movielens_keras3.py $(ARGS)

# Two processes, as on a cluster; KERAS=3 for a model of Keras 3.
# ARGS="--workers 3" and other flags.
multi-worker: $(VENV)/.ready-examples $(VENV)/.movielens
multi-worker: ## Train on MovieLens-100K with several workers
	TF_USE_LEGACY_KERAS=$(if $(filter 3,$(KERAS)),0,1) \
		$(RUN) examples/multi_worker.py $(ARGS)

# One process, two replicas; ARGS="--rows 1000000" and other flags.
dlrm: $(VENV)/.ready-examples ## Train a DLRM on synthetic clicks
	$(RUN) examples/dlrm_synthetic.py $(ARGS)

# An emulated slice; ARGS="--emulate v6e-4", or --tpu NAME for a real one.
tpu: $(VENV)/.ready-examples $(VENV)/.movielens ## Train on an emulated TPU
	$(RUN) examples/tpu_ranking.py $(or $(ARGS),--emulate v5p-8)

# ARGS="--ratings ml-1m/ratings.dat" for other data; and other flags.
sequences: $(VENV)/.ready-examples $(VENV)/.movielens
sequences: ## Train SASRec on MovieLens-100K's histories
	$(RUN) examples/sequences.py $(ARGS)

# ARGS="--checkpoints FOLDER" to go on where it was; and other flags.
streaming: $(VENV)/.ready-examples $(VENV)/.movielens
streaming: ## Train on MovieLens-100K day by day, with ids that come and go
	$(RUN) examples/streaming.py $(ARGS)

# ARGS="--clusters 12" and other flags.
semantic-ids: $(VENV)/.ready-examples $(VENV)/.movielens
semantic-ids: ## Rate MovieLens-100K's cold movies by prefixes of their codes
	$(RUN) examples/semantic_ids.py $(ARGS)

serve: $(VENV)/.ready-examples $(VENV)/.movielens ## Serve it from C++
	$(RUN) examples/serve.py $(ARGS)

PYTEST := $(RUN) -m pytest -n 2 --dist loadgroup
test: $(VENV)/.ready-test ## Run the tests; ARGS="-k ragged" picks some
	$(PYTEST) -m "not (more or tools or docs)" $(ARGS)

# Planner, reports, conversion, commands, monitoring, serving, data, examples.
test-tools: $(VENV)/.ready-test ## Run those of what no training step needs
	$(PYTEST) -m "tools and not more" $(ARGS)

# Those of test-tools too: in one run, no core waits for another's last test.
test-more: $(VENV)/.ready-test ## Run those that make test has no time for
	$(PYTEST) -m "more or tools" $(ARGS)

nightly: $(VENV)/.ready-test $(VENV)/.movielens ## Run all tests, in all variants
	TFRS_EMBED_NIGHTLY=1 $(PYTEST) $(ARGS)
	$(if $(ARGS),,$(RUN) tests/upstream/run.py)

# Slurm's daemons, and hosts with names; tests/clusters says what that takes.
test-clusters: $(VENV)/.ready-test ## Run the recipes of docs/clusters.md
	TFRS_EMBED_NIGHTLY=1 $(RUN) -m pytest $(ARGS) tests/clusters

# ARGS="--runs 20 --seed 2" for other ones; it prints a line for each.
faults: $(VENV)/.ready-test ## Kill workers of training jobs at random moments
	$(RUN) tests/faults/run.py $(or $(ARGS),--runs 200 --seed 1)

# The oldest TensorFlow of tfrs_embed/compat/version.py; Python 3.12 is its newest.
$(OLDEST_VENV)/.installed: setup.py pyproject.toml tfrs_embed/compat/version.py
	$(MAKE) VENV=$(OLDEST_VENV) $(addprefix $(OLDEST_VENV)/,.created .movielens)
	oldest=$$(sed -n 's/^OLDEST_TENSORFLOW = "\(.*\)"/\1/p' \
		tfrs_embed/compat/version.py) && \
	$(OLDEST_VENV)/bin/python -m pip --disable-pip-version-check -qq install \
		"tensorflow==$$oldest.*" "tf-keras==$$oldest.*" --editable '.[test]'
	@touch $@

test-oldest: $(OLDEST_VENV)/.installed ## Run the tests on the oldest TensorFlow
	$(OLDEST_VENV)/bin/python -m tfrs_embed.kernels.build --if-possible
	$(OLDEST_VENV)/bin/python -m pytest -n 2 --dist loadgroup $(ARGS)

# What held in which tier, for the table in docs/tpu.md.
TIERS := $(CURDIR)/.tpu-tiers.jsonl

# TensorFlow's wheel for TPUs has SparseCore's host operations for any CPU.
$(TPU_VENV)/.installed: $(wildcard tests/tpu_wheel/*.txt) setup.py pyproject.toml
	$(MAKE) VENV=$(TPU_VENV) $(TPU_VENV)/.created
	$(TPU_VENV)/bin/python -m pip --disable-pip-version-check -qq \
		install --requirement tests/tpu_wheel/requirements.txt
	$(TPU_VENV)/bin/python -m pip --disable-pip-version-check -qq \
		install --no-deps --requirement tests/tpu_wheel/wheels.txt \
		--editable .
	@touch $@

# On slices of all sizes: TFRS_EMBED_NIGHTLY=1 make test-tpu-wheel
test-tpu-wheel: $(TPU_VENV)/.installed ## Test against SparseCore's own kernels
	rm -f $(TIERS)
	TFRS_EMBED_TIERS=$(TIERS) \
		$(TPU_VENV)/bin/python -m pytest -n 2 --dist loadgroup $(ARGS) \
		tests/tpu_wheel \
		"tests/test_tpu_strategies.py::test_more_slices[tpu:4x4]"

# The recipe of docs/tpu.md; it downloads 1 GB.
test-tpu-vm: ## Install as on a TPU VM, and train on an emulated slice
	$(PYTHON) tests/tpu_vm_recipe.py

# libtpu's compiler works without a TPU too; an older one beside the newest.
$(COMPILER_VENV)/.installed: tests/tpu_wheel/compiler_requirements.txt
	$(MAKE) VENV=$(COMPILER_VENV) $(COMPILER_VENV)/.created
	$(COMPILER_VENV)/bin/python -m pip --disable-pip-version-check -qq \
		install --requirement tests/tpu_wheel/compiler_requirements.txt
	rm -rf $(COMPILER_VENV)/older
	$(COMPILER_VENV)/bin/python -m pip --disable-pip-version-check -qq \
		install --no-deps --target $(COMPILER_VENV)/older libtpu==0.0.20
	@touch $@

# Everything: TFRS_EMBED_NIGHTLY=1 make test-tpu-compile
test-tpu-compile: $(TPU_VENV)/.installed $(COMPILER_VENV)/.installed
test-tpu-compile: ## Compile programs for TPUs with libtpu, without a TPU
	TFRS_EMBED_TPU_COMPILER=$(CURDIR)/$(COMPILER_VENV)/bin/python \
	TFRS_EMBED_TPU_COMPILER_OLDER=$(CURDIR)/$(COMPILER_VENV)/older/libtpu/libtpu.so \
	TFRS_EMBED_TIERS=$(TIERS) \
		$(TPU_VENV)/bin/python -m pytest -n 2 $(ARGS) \
		tests/tpu_wheel/test_compiler.py

# After test-tpu-wheel and test-tpu-compile: what they found is what docs say.
tpu-support: ## Check the table in docs/tpu.md; ARGS=update writes it
	$(TPU_VENV)/bin/python tests/tpu_wheel/support.py $(or $(ARGS),check) \
		$(TIERS)

# ARGS="--seconds 600" for more; it needs g++ or clang++.
sanitize: $(VENV)/.installed-test ## Fuzz the kernels under sanitizers
	$(RUN) tests/sanitize/run.py $(ARGS)

# ARGS="--count 50 --only ops/"; what it has found is in .mutation.
mutation: $(VENV)/.ready-mutation ## Look for changes that no test finds
	$(RUN) tests/mutation/run.py $(ARGS)

# ARGS="--every 5" for a fifth of them; SOURCE=FOLDER for those in no wheel.
upstream: $(VENV)/.ready-test ## Run TFRS's, Keras's and others' tests on it
	$(RUN) tests/upstream/run.py $(ARGS)

# SOURCE=FOLDER has their repositories; ARGS="--only dcn" for one.
tutorials: $(VENV)/.ready-test $(VENV)/.ready-examples $(VENV)/.movielens
tutorials: ## Run TFRS's and keras_rs's tutorials with our layers: equal losses
	$(RUN) tests/upstream/run_tutorials.py $(ARGS)

lint: $(VENV)/.installed-lint ## Check style, types and the order of imports
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(VENV)/bin/lint-imports

# site/index.html is its first page, with a server and without one.
docs: $(VENV)/.ready-test $(VENV)/.installed-docs $(VENV)/.movielens
docs: ## Build the documentation in site/, check links, run its code
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict
	TFRS_EMBED_SITE=$(CURDIR)/site $(RUN) -m pytest $(ARGS) \
		tests/test_site.py tests/test_docs.py

format: $(VENV)/.installed-lint ## Bring the code into style
	$(RUN) -m ruff check --fix-only .
	$(RUN) -m ruff format .

# The peers bring gigabytes, and pins of their own.
$(BENCH_VENV)/.installed: $(wildcard benchmarks/*.txt) setup.py pyproject.toml
	$(MAKE) VENV=$(BENCH_VENV) $(BENCH_VENV)/.created
	$(BENCH_VENV)/bin/python -m pip --disable-pip-version-check -qq \
		install --editable . --requirement benchmarks/requirements.txt
	$(BENCH_VENV)/bin/python -m pip --disable-pip-version-check -qq \
		install --no-deps --requirement benchmarks/wheels.txt
	@touch $@

# ARGS="--cases single forward" and other flags: these only print a report.
# --quick tries the suite out.
bench: $(BENCH_VENV)/.installed $(VENV)/.ready-test
bench: ## Compare speed with other libraries, and write docs/benchmarks.md
	$(BENCH_VENV)/bin/python benchmarks/run.py \
		$(or $(ARGS),--output docs/benchmarks.md)
	$(RUN) benchmarks/sharded.py
	$(RUN) benchmarks/checkpoints.py
	$(RUN) benchmarks/dynamic.py

# ARGS="cornac" for one row; docs/results.md names them.
results: $(VENV)/.ready-examples $(VENV)/.movielens
results: ## Compute figures that others publish, and write docs/results.md
	$(RUN) benchmarks/results/run.py $(ARGS)

WHEEL_CHECK := import sys, tfrs_embed; \
	assert "tensorflow_recommenders" not in sys.modules; \
	print("imported", tfrs_embed.__version__, "from", tfrs_embed.__file__)
KERNELS_CHECK := from tfrs_embed.kernels import build, status; \
	print(status()); assert status().loaded or not build.find_compiler()

# The build goes first: modules since removed would still be taken from it.
# pip uninstall leaves the compiled kernels: Python then finds an empty package.
wheel: $(VENV)/.created ## Build dist/*.whl and try it in an empty venv
	rm -rf .build/wheel dist
	$(PIP) wheel --no-deps --wheel-dir dist .
	tmp=$$(mktemp -d) && trap 'rm -rf "$$tmp"' EXIT && \
	$(RUN) -m venv "$$tmp/venv" && \
	"$$tmp/venv/bin/python" -m pip install -qq --no-compile dist/*.whl && \
	cd "$$tmp" && env -i venv/bin/python -c '$(WHEEL_CHECK)' && \
	env -i venv/bin/tfrs-embed info && \
	env -i PATH="$$PATH" venv/bin/python -m tfrs_embed.kernels.build \
		--if-possible && \
	env -i PATH="$$PATH" venv/bin/python -c '$(KERNELS_CHECK)' && \
	venv/bin/python -m pip uninstall -qq --yes tfrs_embed && \
	! env -i venv/bin/python -c 'import tfrs_embed; tfrs_embed.__version__'

# The tools alone; run.py makes an environment for each TensorFlow.
$(WHEELS_VENV)/tools/.installed: tools/wheels/requirements.txt
	$(MAKE) VENV=$(WHEELS_VENV)/tools $(WHEELS_VENV)/tools/.created
	$(WHEELS_VENV)/tools/bin/python -m pip --disable-pip-version-check -qq \
		install --no-deps --requirement tools/wheels/requirements.txt
	@touch $@

# ARGS="--releases 2.21.0" for some TensorFlows, "--here .venv/bin/python" for
# the installed one. They need g++ 12: with a newer one auditwheel may refuse.
wheels: $(WHEELS_VENV)/tools/.installed
wheels: ## Build dist/*.whl with kernels for each TensorFlow, and try it there
	$(WHEELS_VENV)/tools/bin/python tools/wheels/run.py $(ARGS)

# BAZEL_TESTS="//tests:test_rules" for some tests.
bazel: $(VENV)/.installed-test ## Build and test with Bazel, in .venv
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" && \
	$(BAZEL) $(BAZEL_STARTUP) build //... && \
	$(BAZEL) $(BAZEL_STARTUP) test $(BAZEL_ARGS) $(or $(BAZEL_TESTS),//...)

clean: ## Remove what these targets made, .venv too
	rm -rf $(VENV) $(BENCH_VENV) $(TPU_VENV) $(COMPILER_VENV) $(OLDEST_VENV) $(WHEELS_VENV) .build dist site
	rm -rf *.egg-info $(TIERS) examples/notebooks/executed
	rm -rf .hypothesis .mypy_cache .pytest_cache .ruff_cache
	rm -f tfrs_embed/kernels/*.so
	find . -name __pycache__ -prune -exec rm -rf {} +
