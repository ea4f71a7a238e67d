# Everything runs in .venv, which every target makes by itself.
PY := .venv/bin/python
FIT := $(PY) -m trainers.fit
RUNS ?= runs

.PHONY: quickstart test chaos lint lab-deer lab-pcllm lab-asarm lab-cspd clean

.venv/installed: setup.cfg constraints.txt
	test -x $(PY) || python3 -m venv .venv
	$(PY) -m pip install -q -c constraints.txt torch
	$(PY) -m pip install -q -c constraints.txt -e '.[train,lab,test]'
	touch $@

quickstart: .venv/installed  ## train and decode with DEER at lab scale, from nothing (minutes)
	$(FIT) recipe=deer_stage2 runs=$(RUNS)
	$(PY) -m decoding.bench model=$(RUNS)/deer_stage2/export also=$(RUNS)/deer_stage1/export prompts=12 max_new_tokens=64

LAB = runs=$(RUNS)/lab trainer.compile=true
lab-deer: .venv/installed  ## the figures of docs/results.md: about an hour on 2 cores
	$(FIT) recipe=ar_target $(LAB) trainer.max_steps=2400
	$(FIT) recipe=diffusion_adapt $(LAB) trainer.max_steps=400
	$(PY) -m decoding.collect recipe=deer_answers runs=$(RUNS)/lab prompts.count=2560
	$(FIT) recipe=deer_stage1 $(LAB) trainer.max_steps=600
	$(FIT) recipe=deer_stage2 $(LAB) trainer.max_steps=950
	$(PY) -m decoding.bench model=$(RUNS)/lab/deer_stage2/export also=$(RUNS)/lab/deer_stage1/export

PCLLM = $(RUNS)/lab/pcllm_round
BENCH = $(PY) -m decoding.bench
lab-pcllm: .venv/installed  ## both rounds of pcLLM and their benches; shares lab-deer's target
	$(FIT) recipe=ar_target $(LAB) trainer.max_steps=2400
	$(PY) -m decoding.collect recipe=pcllm_trajectories runs=$(RUNS)/lab prompts.count=2560
	$(FIT) recipe=pcllm_round1 $(LAB) trainer.max_steps=800
	$(PY) -m decoding.collect recipe=pcllm_trajectories runs=$(RUNS)/lab prompts.count=2560 name=round2 collector.teacher=$(PCLLM)1/export collector.block_size=32
	$(FIT) recipe=pcllm_round2 $(LAB) trainer.max_steps=400
	$(BENCH) model=$(RUNS)/lab/ar_target/export 'sampler=[method=jacobi,block_size=16]' out=$(RUNS)/lab/ar_target/bench_jacobi
	$(BENCH) model=$(PCLLM)2/export also=$(PCLLM)1/export 'sampler=[method=jacobi,block_size=16]' out=$(PCLLM)2/bench_jacobi
	$(BENCH) model=$(PCLLM)2/export also=$(PCLLM)1/export

lab-asarm: .venv/installed  ## an any-subset model that fills holes, and its bench
	$(FIT) recipe=ar_target $(LAB) trainer.max_steps=2400
	$(FIT) recipe=asarm_joint $(LAB) trainer.max_steps=1600 data.corruption.curriculum=200
	$(PY) -m decoding.infill_bench model=$(RUNS)/lab/asarm_joint/export judge=$(RUNS)/lab/ar_target/export

CSPD = recipe=cspd_draft runs=$(RUNS)/lab trainer.max_steps=1000
CSPD_BENCH = $(PY) -m decoding.image_bench model=$(RUNS)/lab/cspd_draft
lab-cspd: .venv/installed  ## both heads of CSpD, drafters with and without distillation, and their benches
	$(FIT) recipe=cspd_target runs=$(RUNS)/lab trainer.max_steps=1000
	$(FIT) $(CSPD)
	$(CSPD_BENCH)/export features=digits
	$(FIT) recipe=cspd_target runs=$(RUNS)/lab trainer.max_steps=1000 name=diffusion network.head=diffusion
	$(FIT) $(CSPD) name=diffusion network.head=diffusion target=$(RUNS)/lab/cspd_target/diffusion/export
	$(CSPD_BENCH)/diffusion/export features=digits
	$(FIT) $(CSPD) name=distilled network.head=diffusion target=$(RUNS)/lab/cspd_target/diffusion/export module.distillation=1.0
	$(CSPD_BENCH)/distilled/export features=digits

test: .venv/installed  ## the whole test suite
	$(PY) -m pytest -n 2

chaos: .venv/installed  ## kill a run ten times, also in a checkpoint's write: it must end as if left alone (minutes)
	$(PY) -m tests.chaos

lint: .venv/installed  ## ruff, as CI runs it
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

clean:
	rm -rf runs .venv
