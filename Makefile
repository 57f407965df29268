# memspan: `make` lists the targets.
PYTHON ?= python3
BIN := .venv/bin
ARGS ?=

.PHONY: help native demo test test-rest test-all smoke newest oldest releases check package docs docs-read docs-test figures house journeys vectors bench bench-delta-rule instructions instructions-store bench-learning gpu gpu-bundle chaos fuzz constraints soak clean
help: ## list the targets
	@grep -E '^[a-z.-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

.venv: .venv/.installed ## make the environment and install memspan for development
.venv/.installed: pyproject.toml packages/statelaws/pyproject.toml constraints.txt
	@echo "installing PyTorch and memspan in .venv: a minute or two"
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]' -e ./packages/statelaws
	touch $@

C := $(wildcard src/memspan/native/*.[ch] src/memspan/ops/*/*.[ch]) hatch_build.py
LIBRARIES := src/memspan/native/built/digests.json

# An editable install has compiled them, too: they are older than what has changed since.
native: $(LIBRARIES) ## compile the C that has changed; most targets that need it do so first
$(LIBRARIES): $(C)
	$(PYTHON) hatch_build.py

demo: .venv native ## train a small Transformer-XL, score it and show what it writes (two minutes)
	$(BIN)/memspan train $(ARGS)

test: .venv native ## run the tests, but for test-rest and what needs the libraries that memspan works with
	$(BIN)/pytest -n 2 -m 'not hardening and not processes and not journeys' $(ARGS)

test-rest: .venv native ## run the tests with hostile files, bad input, changed modules, several processes
	$(BIN)/pytest -n 2 -m '(hardening or processes) and not journeys' $(ARGS)

.full-venv: .full-venv/.installed
.full-venv/.installed: pyproject.toml packages/statelaws/pyproject.toml constraints.txt
	@echo "installing PyTorch, memspan and all its extras in .full-venv: a few minutes"
	$(PYTHON) -m venv .full-venv
	.full-venv/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,all]' -e ./packages/statelaws
	touch $@

test-all: .full-venv native ## run the whole test suite, with all extras
	.full-venv/bin/pytest -n 2 $(ARGS)

smoke: .full-venv native ## run a few tests of what needs other libraries (a minute)
	.full-venv/bin/pytest -m smoke tests/integrations $(ARGS)

# trl, peft and lightning are no extras: tests of what they do with exported models are skipped elsewhere.
newest: ## run tests/integrations with the newest versions of all libraries but torch (minutes)
	rm -rf .newest-venv
	$(PYTHON) -m venv .newest-venv
	grep '^torch==' constraints.txt > .newest-venv/torch.txt
	.newest-venv/bin/pip install --quiet --disable-pip-version-check -c .newest-venv/torch.txt -e '.[dev,all]' -e ./packages/statelaws \
	    trl peft lightning
	.newest-venv/bin/pytest -n 2 tests/integrations packages/statelaws/tests/test_transformers.py --deselect tests/integrations/test_pins.py $(ARGS)

# pip cannot ask for the oldest versions that the ranges in pyproject.toml allow.
oldest: ## run what depends on libraries most with the oldest versions that pyproject.toml allows (minutes)
	rm -rf .oldest-venv
	$(PYTHON) -m venv .oldest-venv
	.oldest-venv/bin/pip install --quiet --disable-pip-version-check uv
	.oldest-venv/bin/uv pip install --quiet --python .oldest-venv/bin/python \
	    --resolution lowest-direct -e '.[all]' -e ./packages/statelaws
	.oldest-venv/bin/uv pip install --quiet --python .oldest-venv/bin/python \
	    pytest pytest-xdist hypothesis beartype
	.oldest-venv/bin/pytest -n 2 tests/data tests/distributed tests/models tests/runs tests/training \
	    tests/integrations/test_model.py tests/integrations/test_export.py \
	    tests/integrations/test_standard_scripts.py $(ARGS)

# Between the lower bound in pyproject.toml and the newest: each renamed something that memspan asks for.
TRANSFORMERS = 5.4.0 5.10.4 5.17.0 5.24.0
TRANSFORMERS_TESTS = $(addprefix tests/integrations/test_,arguments.py check_exported.py export.py \
    gated_delta_layers.py matrix_layers.py measure_models.py model.py standard_scripts.py tokenizer.py \
    travel.py) packages/statelaws/tests

releases: ## run what depends on transformers with four of its releases (minutes)
	rm -rf .releases-venv
	$(PYTHON) -m venv .releases-venv
	.releases-venv/bin/pip install --quiet --disable-pip-version-check uv
	.releases-venv/bin/uv pip install --quiet --python .releases-venv/bin/python \
	    -c constraints.txt -e '.[dev,all]' -e ./packages/statelaws
	failed=; for release in $(TRANSFORMERS); do \
	    .releases-venv/bin/uv pip install --quiet --python .releases-venv/bin/python transformers==$$release && \
	    echo "transformers $$release" && \
	    .releases-venv/bin/pytest -n 2 -W ignore::FutureWarning $(TRANSFORMERS_TESTS) $(ARGS) || failed="$$failed $$release"; \
	done; test -z "$$failed" || { echo "failed with transformers$$failed"; exit 1; }

journeys: .full-venv native ## run every journey of a run, a verb and a text, as before a release (minutes)
	.full-venv/bin/pytest -n 2 -m '' tests/journeys tests/integrations/test_travel.py $(ARGS)

check: .venv ## lint, format, types, import contract, workflows
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/zizmor --quiet --offline --strict-collection .github/workflows

package: .venv ## build memspan and statelaws in dist, and try each in an environment of its own (minutes)
	rm -rf dist
	$(BIN)/hatchling build
	cd packages/statelaws && $(abspath $(BIN))/hatchling build -d ../../dist
	$(PYTHON) tests/installed.py dist

.docs-venv: .docs-venv/.installed
.docs-venv/.installed: docs/docsite/requirements.txt
	$(PYTHON) -m venv .docs-venv
	.docs-venv/bin/pip install --quiet --disable-pip-version-check -r docs/docsite/requirements.txt
	touch $@

docs: .docs-venv ## build the documentation site in .docs-build/site; needs no network once installed
	PYTHONPATH=docs .docs-venv/bin/python -m docsite build

docs-read: .docs-venv ## after reading: accept the code as it stands beside the notes
	PYTHONPATH=docs .docs-venv/bin/python -m docsite read

figures: .venv .docs-venv ## write and draw docs/figures and docs/path anew, and colour all pictures
	$(BIN)/python benchmarks/figures.py
	$(BIN)/python benchmarks/twelve_tokens.py
	PYTHONPATH=docs .docs-venv/bin/python -m docsite figures

house: .venv ## draw docs/house.svg anew: the modules of the package and their lines
	$(BIN)/python benchmarks/house.py

docs-test: docs ## look at the built site in headless Chromium, which must be installed
	PYTHONPATH=docs .docs-venv/bin/pytest -q -o addopts= docs/browser $(ARGS)

vectors: .venv native ## write what each architecture computes, for other runtimes to compare with
	$(BIN)/python tests/vectors.py vectors

bench: native ## measure speed and memory against peers, in an environment of its own
	PYTHON=$(PYTHON) sh benchmarks/environment.sh
	.bench-venv/bin/python benchmarks/throughput.py $(ARGS)

bench-delta-rule: native ## measure the delta rule against peers, in the same environment (minutes)
	PYTHON=$(PYTHON) sh benchmarks/environment.sh
	.bench-venv/bin/python benchmarks/delta_rule_peers.py $(ARGS)

instructions: .venv native ## count instructions of short workloads and compare them with those stored; needs valgrind (minutes)
	$(BIN)/python benchmarks/instructions.py

instructions-store: .venv native ## count instructions of short workloads and store them
	$(BIN)/python benchmarks/instructions.py --store

bench-learning: .venv native ## measure learning on Tiny Shakespeare against a plain GPT
	$(BIN)/python benchmarks/memory_worth.py --models gpt transformer-xl --sides carried $(ARGS)

gpu: .venv ## run laws, kernels and models on a GPU beside their predictions (ten minutes); where there is none, say so and fail
	$(BIN)/python benchmarks/gpu.py $(ARGS)

gpu-bundle: .venv native ## make dist/gpu-bundle, which runs make gpu where there is no network; needs Triton (minutes)
	rm -rf dist
	$(BIN)/hatchling build
	cd packages/statelaws && $(abspath $(BIN))/hatchling build -d ../../dist
	$(PYTHON) benchmarks/on_gpu/bundle.py dist $(abspath $(BIN))/python

chaos: .venv native ## kill, starve and damage training runs, and see what is left of them (minutes)
	$(BIN)/python benchmarks/chaos.py $(ARGS)

fuzz: .venv native ## fuzz everything that is read; installs the extra fuzz (minutes)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,fuzz]'
	$(BIN)/python tests/fuzz.py $(ARGS)

constraints: ## write constraints.txt anew: today's versions of all that development needs (Linux)
	rm -rf .pin-venv
	$(PYTHON) -m venv .pin-venv
	grep '^torch==' constraints.txt > .pin-venv/torch.txt
	.pin-venv/bin/pip install --quiet --disable-pip-version-check -c .pin-venv/torch.txt \
	    -e '.[dev,all,fuzz]' -e ./packages/statelaws hatchling
	{ grep '^#' constraints.txt; cat .pin-venv/torch.txt; \
	  .pin-venv/bin/pip freeze --all --exclude-editable --exclude pip \
	    | grep -vE '^(torch|triton|nvidia-.*|cuda-.*)=='; } > .pin-venv/constraints.txt
	mv .pin-venv/constraints.txt constraints.txt
	rm -rf .pin-venv

soak: .venv native ## train, validate and generate in one process for half an hour: do memory and speed stay?
	$(BIN)/python benchmarks/soak.py $(ARGS)

clean: ## remove the environments and caches
	rm -rf .venv .full-venv .bench-venv .docs-venv .docs-build .pin-venv .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
