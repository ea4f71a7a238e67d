# Every target runs in .venv, and makes it where it is missing. Experiments are in examples/.
PY := .venv/bin/python
FIT := $(PY) -m trainers.fit
RUNS ?= runs/quickstart
KILLS ?= 10
INPUTS ?= 1000
AVX2 := ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 NUMBA_CPU_NAME=haswell NUMBA_CPU_FEATURES=+avx2,+fma
MKDOCS := NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs
# A worker that is done takes over half of the other's tests: a module's tests, and so its fixtures,
# stay together.
TEST = $(PY) -m pytest -n 2 --dist worksteal $(if $(SEED),--randomly-seed=$(SEED) --hypothesis-seed=$(SEED))

.PHONY: quickstart test test-all test-avx2 lint docs docs-serve paper-scale chaos fuzz soak load packed-step clean

.venv/installed: setup.cfg constraints.txt
	test -x $(PY) || python3 -m venv .venv
	$(PY) -m pip install -q -c constraints.txt torch
	$(PY) -m pip install -q -c constraints.txt -e '.[train,lab,test]'
	touch $@

.venv/docs: .venv/installed
	$(PY) -m pip install -q -c constraints.txt -e '.[docs]'
	touch $@

quickstart: .venv/installed  ## train a small target and a DEER drafter, and decode with them, from nothing (minutes)
	$(FIT) recipe=deer_stage2 scale=quick runs=$(RUNS)
	$(PY) -m decoding.bench model=$(RUNS)/deer_stage2/export prompts=8 max_new_tokens=64 dtype=float32 verify=[coupled,tree] generate=false

test: .venv/installed  ## the tests that take minutes, in random order; SEED=3 (printed at the end) repeats one
	$(TEST) -m "not slow and not processes" $(PYTEST)

test-all: .venv/installed  ## every test, as CI runs them
	$(TEST) $(PYTEST)

test-avx2: .venv/installed  ## the tests of `make test`, on a CPU as if it had AVX2 only, as most laptops
	$(AVX2) $(TEST) -m "not slow and not processes" $(PYTEST)

lint: .venv/installed  ## ruff and mypy, as CI runs them
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

docs: .venv/docs  ## the documentation site, strictly, into site/
	$(MKDOCS) build --strict

docs-serve: .venv/docs  ## the same at http://127.0.0.1:8000, built again at every change
	$(MKDOCS) serve

paper-scale: .venv/installed  ## what the numbers of every recipe at scale=paper mean, compared with the papers'
	$(PY) -m pytest -q -s -p no:randomly tests/test_paper_scale.py

chaos: .venv/installed  ## kill runs and a collection again and again (KILLS=100): they must end as those left alone
	$(PY) -m tests.chaos kills=$(KILLS)

fuzz: .venv/installed  ## draw arguments of every command (INPUTS=10000): its work or one line, and no traceback
	HF_HUB_OFFLINE=1 $(PY) -m tests.fuzz inputs=$(INPUTS)

soak: .venv/installed  ## train for an hour, then decode for one: no more memory, files or threads at the end
	$(PY) -m tests.soak minutes=60

load: .venv/installed  ## ten minutes of 32 clients on the server, with the quickstart's drafter: each text is its seed's
	$(PY) -m tests.load model=$(RUNS)/deer_stage2/export minutes=10 clients=32

packed-step: .venv/installed  ## time pcLLM's packed training step against separate passes (a minute)
	$(PY) -m tests.packed_step

clean:  ## remove runs/, site/ and .venv
	rm -rf runs site .venv
