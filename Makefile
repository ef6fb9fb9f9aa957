# Everything from nothing: `make demo` runs the main job, `make test` passes the tests.
PYTHON ?= python3
VENV := .venv
EXTRAS_VENV := .venv-extras
VLLM_VENV := .venv-vllm
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
MINUTES ?= 10
# The tests start hundreds of processes: without compiled modules on the disk each would compile its imports again (12 s).
export PYTHONDONTWRITEBYTECODE :=
# What users of the library see: checked strictly.
PUBLIC := rl_core/__init__.py rl_core/readers.py rl_core/api rl_core/trackers rl_core/training/callbacks.py \
	rl_core/service/client.py rl_core/service/client_calls.py

.PHONY: help setup demo demo-real demo-results test test-all test-extras sdk-test clients-test transformers4-test llama-test vllm-test crash-test service-crash-test fuzz lint format docs clean

help:  ## what can be made
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-18s %s\n", $$1, $$2}'

$(STAMP): pyproject.toml constraints.txt posttrain/install.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "posttrain needs Python 3.11 or newer; name one with: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python deployments/install.py --extras dev
	@touch $@

setup: $(STAMP)  ## virtual environment with pinned dependencies, editable install

demo: $(STAMP)  ## run the main job: configs/demo.yaml
	$(BIN)/posttrain run configs/demo.yaml

demo-real: $(STAMP)  ## GRPO on a pretrained model (SmolLM2-135M, 93 MB): configs/real.yaml
	$(BIN)/posttrain run configs/real.yaml

demo-results: $(STAMP)  ## the quick start's table and pictures, from one run of the demo
	$(BIN)/python docs/tools/demo_results.py

test: $(STAMP)  ## the test suite (12 to 13 minutes on 2 idle cores)
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder -m 'not slow'

test-all: $(STAMP)  ## the test suite with the slow proofs
	$(BIN)/python -m pytest

# Extras that install in 15 s and 250 MB; ray (500 MB) with EXTRAS=$(EXTRAS),ray
EXTRAS ?= gymnasium,sweep,tensorboard,datadog,quantize,data,mcp,math,reasoning-gym,monitor,wandb,evaluators
test-extras: pyproject.toml constraints.txt  ## tests of code behind optional packages, in an environment of its own (weekly)
	test -x $(EXTRAS_VENV)/bin/python || $(PYTHON) -m venv $(EXTRAS_VENV)
	$(EXTRAS_VENV)/bin/python deployments/install.py --extras dev,$(EXTRAS)
	$(EXTRAS_VENV)/bin/python -m pytest -n 2 --dist loadfile -m 'not slow' \
		$$(grep -rlE 'importorskip\(|find_spec\("gradio"|tensorboard' tests --include='test_*.py')

fuzz: $(STAMP)  ## fuzz the readers of configs, data, tool calls and templates (make fuzz MINUTES=10)
	cd tests && PYTHONPATH=..:. OMP_NUM_THREADS=1 ../$(BIN)/python -m fuzz.run --minutes $(MINUTES)

transformers4-test: $(STAMP)  ## written models read by transformers 4, in a folder of its own
	$(BIN)/python -m pip install -q --upgrade --no-deps --target build/transformers4 \
		'transformers<5' 'huggingface-hub<1' 'tokenizers<0.23'
	POSTTRAIN_TRANSFORMERS4=$(CURDIR)/build/transformers4 $(BIN)/python -m pytest -q tests/rl_core/models/test_portable_files.py

llama-test: $(STAMP)  ## written GGUF files read by llama.cpp, in a folder of its own
	$(BIN)/python -m pip install -q --upgrade --no-deps --target build/llama_cpp xllamacpp
	PYTHONPATH=build/llama_cpp $(BIN)/python -m pytest -q -rP tests/rl_core/models/test_llama_cpp.py

sdk-test: $(STAMP)  ## the unmodified tinker SDK, four versions in environments of their own (.clients), against the training service
	POSTTRAIN_SDK_ENVIRONMENTS=$(CURDIR)/.clients/tinker $(BIN)/python -m pytest -s tests/posttrain/training_service/test_public_client.py tests/posttrain/training_service/test_sdk_parity.py \
		tests/posttrain/training_service/test_sdk_examples.py

clients-test: $(STAMP)  ## OpenAI's clients and tools, unmodified, in environments of their own (.clients), against the chat server
	POSTTRAIN_CLIENTS=$(CURDIR)/.clients $(BIN)/python -m pytest -s -m clients tests/posttrain/serving/test_clients.py \
		tests/posttrain/serving/test_inspect_suites.py

vllm-test: $(STAMP)  ## the real vLLM, its CPU build (3.1 GB, 4 to 7 minutes) in a separate environment, with a pretrained model (30 minutes)
	test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python deployments/vllm/install_cpu.py
	POSTTRAIN_VLLM_PYTHON=$(CURDIR)/$(VLLM_VENV)/bin/python $(BIN)/python -m pytest -s -m vllm \
		tests/rl_core/rollout_workers/test_real_vllm.py

crash-test: $(STAMP)  ## kill a small pipeline everywhere, restart, compare; OPTIONS="--seconds 600 --random 50"
	PYTHONPATH=.:tests $(BIN)/python -m crash --output outputs/crash-test $(OPTIONS)

service-crash-test: $(STAMP)  ## kill a training service 500 times under load, compare; OPTIONS="--kills 50"
	cd tests && PYTHONPATH=..:. OMP_NUM_THREADS=1 ../$(BIN)/python -m crash.service \
		--output ../outputs/service-crash-test $(OPTIONS)

lint: $(STAMP)  ## formatter, linter and type checker, as CI runs them
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mypy --strict --follow-imports=silent $(PUBLIC) tests/rl_core/api/typed_usage.py

format: $(STAMP)  ## let the formatter and the linter mend what they can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(STAMP)  ## build the documentation into docs-site/; warnings are errors
	$(BIN)/python deployments/install.py --extras dev,docs
	$(BIN)/python docs/tools/generate.py --check
	mkdir -p docs/pictures && cp tests/benchmarks/pictures/*.png docs/pictures/
	PYTHONPATH=docs/tools $(BIN)/zensical build --clean --strict

clean:  ## remove the virtual environment and caches; outputs stay
	rm -rf $(VENV) $(EXTRAS_VENV) $(VLLM_VENV) .clients docs-site .cache .ruff_cache .mypy_cache posttrain.egg-info build
