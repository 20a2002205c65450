# Every goal does its own set-up: a virtual environment in this folder, installed from pinned versions.
# On a machine with an NVIDIA card the same pins install the CUDA build of torch; elsewhere torch runs on the CPU.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check

VLLM_VENV := .venv-vllm
VLLM_READY := $(VLLM_VENV)/.ready
PROMPTS ?=

DRAFTER ?= smollm2-eagle3.1
GIVEN ?=
EXCLUDE ?=

.PHONY: demo test test-all test-slow mutations lint parity vllm-engine lossless gpu browser train-speed engine-speed cpu-speed gpu-speed long-context zero-tax arrivals spec-bench soak attack http-overhead vllm-front \
	drafters clean

demo: $(READY)
	$(BIN)/eyas demo

# One process for each core, four at most since each loads the target, on one thread each: more would only wait.
# Bytecode is kept, whatever the environment says: tests start in half the time.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses auto --maxprocesses 4 --dist loadfile

# The fast tier. `make test-all` adds the slow one: statistics, many prompts, whole runs, processes.
test: lint
	$(PYTEST)

test-all: lint
	$(PYTEST) -m ""

# The slow tier alone until UNTIL (seconds since 1970), what the last change touches first: .ci/run.
test-slow: $(READY)
	$(PYTEST) --no-loadscope-reorder -m slow --until $(UNTIL)

# Faults planted one by one into a copy of the tree: fails if `make test` would miss one.
mutations: $(READY)
	$(BIN)/python tests/mutations.py

lint: $(READY)
	$(BIN)/ruff format --check src tests benchmarks recipes
	$(BIN)/ruff check src tests benchmarks recipes
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

# The drafter against the real vLLM (CPU build, its own environment), proposal by proposal.
parity: $(VLLM_READY)
	PYTHONPATH=src $(VLLM_VENV)/bin/python -m pytest -m parity tests/parity -s

# `eyas serve --engine vllm` with the real vLLM (CPU build, its own environment), beside eyas' own engine.
vllm-engine: $(READY) $(VLLM_READY)
	EYAS_VLLM_PYTHON=$(abspath $(VLLM_VENV))/bin/python $(BIN)/pytest -m vllm tests/serve/vllm -s

# Greedy losslessness on real prompts: PROMPTS=file.jsonl (Spec-Bench format), 50 by the reference, 200 by the engine.
lossless: $(READY)
	@test -f "$(PROMPTS)" || { echo "PROMPTS=$(PROMPTS) is no file: make lossless PROMPTS=prompts.jsonl"; exit 2; }
	$(BIN)/pytest -m lossless tests/engine --prompts "$(PROMPTS)" -s

# All that needs a GPU; with PROMPTS=file.jsonl, real prompts through the default target as well.
gpu: $(READY)
	$(BIN)/pytest -m gpu tests/gpu $(if $(PROMPTS),--prompts "$(PROMPTS)" -s)

# The server's page and a report in a real browser: needs chromium and chromedriver
# (Debian: apt install chromium chromium-driver).
browser: $(READY)
	$(PIP) install --constraint constraints.txt --editable '.[dev,browser]'
	$(BIN)/pytest -m browser -rs

# How fast a drafter of an 8B-shaped target trains, and how much of that is the target: needs a large GPU.
train-speed: $(READY)
	for taught in 0.30 0.53 0.75 1.0; do \
		$(BIN)/python benchmarks/train_speed.py --documents 8 --length 4096 --taught $$taught --compile || exit 1; \
	done
	$(BIN)/python benchmarks/train_speed.py --documents 8 --length 4096 --taught 0.53
	$(BIN)/python benchmarks/train_speed.py --documents 1 --length 32768 --taught 0.53

# How fast the engine decodes on a GPU, for random targets of two shapes and a tossed acceptance; with
# VLLM_PYTHON=interpreter, vLLM in turn with it. SPEED_OPTIONS="--rounds 1 --users 64" makes it short.
VLLM_PYTHON ?=
WITH_VLLM = $(if $(VLLM_PYTHON),--vllm-python "$(VLLM_PYTHON)")
SPEED_OPTIONS ?=
gpu-speed: $(READY)
	$(BIN)/python benchmarks/engine_gpu.py --shape 135m --length 2.5 --out gpu-speed-135m.json $(WITH_VLLM) $(SPEED_OPTIONS)
	$(BIN)/python benchmarks/engine_gpu.py --shape 8b --length 3.0 --out gpu-speed-8b.json $(WITH_VLLM) $(SPEED_OPTIONS)

# How an 8B-shaped target decodes behind contexts of up to 128k tokens, and in which memory: needs a large GPU.
LONG_OPTIONS ?=
long-context: $(READY)
	$(BIN)/python benchmarks/long_context.py --shape 8b --out long-context.json $(LONG_OPTIONS)

# The engine on real prompts, with and without speculation: PROMPTS=file.jsonl, DRAFTER=folder if not the shipped one.
engine-speed: $(READY)
	@test -f "$(PROMPTS)" || { echo "PROMPTS=$(PROMPTS) is no file: make engine-speed PROMPTS=prompts.jsonl"; exit 2; }
	$(BIN)/python benchmarks/engine_speed.py "$(PROMPTS)" --generate --users 1 --users 4 --users 16 \
		--drafter "$(DRAFTER)" --random

# The engine on a CPU, quiet and beside other processes; with LLAMA=folder, a build of llama.cpp on the same file.
LLAMA ?=
CPU_OPTIONS ?=
cpu-speed: $(READY)
	$(BIN)/python benchmarks/cpu_speed.py $(if $(LLAMA),--llama "$(LLAMA)") $(CPU_OPTIONS)

# What a drafter costs where it cannot help and gains where it can, against no drafter, with intervals:
# PROMPTS=file.jsonl; on a GPU TAX_OPTIONS="--device cuda --dtype bfloat16"; VLLM_PYTHON=interpreter for vLLM beside it.
TAX_OPTIONS ?=
zero-tax: $(READY)
	@test -f "$(PROMPTS)" || { echo "PROMPTS=$(PROMPTS) is no file: make zero-tax PROMPTS=prompts.jsonl"; exit 2; }
	$(BIN)/python benchmarks/zero_tax.py "$(PROMPTS)" --drafter "$(DRAFTER)" $(WITH_VLLM) $(TAX_OPTIONS)

# Requests at fixed rates to eyas serve and, with VLLM_PYTHON=interpreter, to vllm serve: PROMPTS=file.jsonl.
ARRIVAL_OPTIONS ?=
arrivals: $(READY)
	@test -f "$(PROMPTS)" || { echo "PROMPTS=$(PROMPTS) is no file: make arrivals PROMPTS=prompts.jsonl"; exit 2; }
	$(BIN)/python benchmarks/arrivals.py "$(PROMPTS)" $(WITH_VLLM) $(ARRIVAL_OPTIONS)

# eyas and vLLM with the same target and drafter on a CPU, with and without it, at 1, 4 and 16 users: one report
# (docs/bench.md, docs/results.md). PROMPTS=spec_bench.jsonl, LIMIT=0 for all of it. Without VLLM_OPTIONS vLLM compiles,
# for minutes.
LIMIT ?= 48
MAX_TOKENS ?= 128
REPETITIONS ?= 3
VLLM_OPTIONS ?= --enforce-eager
SPEC_BENCH_OUT ?= spec-bench
SAME := --dtype float32 --max-model-len 2048 --max-num-seqs 16
VLLM_SERVE = VLLM_CPU_KVCACHE_SPACE=1 VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1 $(VLLM_VENV)/bin/vllm serve \
	$(shell $(BIN)/eyas fetch smollm2) --served-model-name smollm2 $(SAME) $(VLLM_OPTIONS)
SPECULATIVE = {"model": "$(SPEC_BENCH_OUT)/drafter", "method": "eagle3", "num_speculative_tokens": 3}
spec-bench: $(READY) $(VLLM_READY)
	@test -f "$(PROMPTS)" || { echo "PROMPTS=$(PROMPTS) is no file: make spec-bench PROMPTS=spec_bench.jsonl"; exit 2; }
	$(BIN)/eyas convert "$(DRAFTER)" --out "$(SPEC_BENCH_OUT)/drafter" --to vllm --force
	$(BIN)/eyas bench --workload "$(PROMPTS)" --limit $(LIMIT) --max-tokens $(MAX_TOKENS) --users 1,4,16 \
		--repetitions $(REPETITIONS) --out "$(SPEC_BENCH_OUT)" \
		--serve 'eyas=eyas serve smollm2 $(SAME)' \
		--serve 'vllm=$(VLLM_SERVE) --speculative-config "$(subst ",\",$(SPECULATIVE))"' \
		--baseline-serve 'vllm=$(VLLM_SERVE)'

# A server under the fire of 64 clients, and a verdict on it (docs/serving.md).
MINUTES ?= 20
soak: $(READY)
	$(BIN)/python benchmarks/soak.py --minutes $(MINUTES) --out soak.json

# Everything that is known to hurt servers, against one, and a verdict on it (docs/serving.md).
attack: $(READY)
	$(BIN)/python benchmarks/attack.py --out attack.json

# The same requests to one engine by hand and over HTTP, 16 users.
http-overhead: $(READY)
	$(BIN)/python benchmarks/http_overhead.py --out http-overhead.json

# The same requests to one vLLM (CPU build), directly and through `eyas serve --engine vllm`, 1 and 8 users.
vllm-front: $(READY) $(VLLM_READY)
	VLLM_CPU_KVCACHE_SPACE=1 HF_HUB_OFFLINE=1 $(BIN)/python benchmarks/vllm_front.py \
		--vllm-python $(abspath $(VLLM_VENV))/bin/python --out vllm-front.json -- --enforce-eager

# The shipped drafter and its control, anew (docs/shipped.md): prompts, the target's answers, training. Needs a GPU.
# GIVEN=file.jsonl adds prompts of your own, EXCLUDE=file.jsonl keeps out what drafters will be evaluated on.
ANSWER = --max-tokens 400 --max-length 1536 --device cuda
drafters: $(READY)
	$(BIN)/python recipes/smollm2/prompts.py --out prompts.jsonl --held-out held-out.jsonl \
		$(addprefix --prompts ,$(GIVEN)) $(addprefix --exclude ,$(EXCLUDE))
	$(BIN)/eyas data answer prompts.jsonl --out answers-greedy.jsonl $(ANSWER) --temperature 0
	$(BIN)/eyas data answer prompts.jsonl --out answers-sampled.jsonl $(ANSWER) --temperature 0.8 --seed 1
	$(BIN)/eyas data answer held-out.jsonl --out answers-held-out.jsonl $(ANSWER) --temperature 0
	$(BIN)/eyas train recipes/smollm2/drafters.toml
	DRAFTER=runs/smollm2/eagle31 EXCLUDE="$(EXCLUDE)" PYTHON=$(BIN)/python \
		recipes/smollm2/own-prompts.sh prompts.jsonl held-out.jsonl runs/own-prompts

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "eyas needs Python 3.11 or newer; $(PYTHON) is older: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --constraint constraints.txt --upgrade pip
	$(PIP) install --constraint constraints.txt --editable '.[dev]'
	@touch $@

# vLLM pins other versions of half of our dependencies, so it lives apart and borrows the source of eyas.
$(VLLM_READY): tests/parity/requirements.txt
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip --quiet --disable-pip-version-check install --upgrade pip
	$(VLLM_VENV)/bin/python -m pip --quiet install --only-binary=:all: --no-deps --requirement $<
	$(VLLM_VENV)/bin/python tests/parity/name_vllm.py
	@touch $@

clean:
	rm -rf $(VENV) $(VLLM_VENV)
