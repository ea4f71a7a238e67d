# Everything runs in .venv, which every target makes by itself.
PY := .venv/bin/python
FIT := $(PY) -m trainers.fit
RUNS ?= runs

.PHONY: quickstart test lint lab-deer lab-asarm clean

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
	$(FIT) recipe=diffusion_adapt $(LAB) trainer.max_steps=300
	$(PY) -m decoding.collect recipe=deer_answers runs=$(RUNS)/lab prompts.count=2560
	$(FIT) recipe=deer_stage1 $(LAB) trainer.max_steps=500
	$(FIT) recipe=deer_stage2 $(LAB) trainer.max_steps=1600
	$(PY) -m decoding.bench model=$(RUNS)/lab/deer_stage2/export also=$(RUNS)/lab/deer_stage1/export

lab-asarm: .venv/installed  ## an any-subset model that fills holes, and its bench
	$(FIT) recipe=ar_target $(LAB) trainer.max_steps=2400
	$(FIT) recipe=asarm_joint $(LAB) trainer.max_steps=1600 data.corruption.curriculum=200
	$(PY) -m decoding.infill_bench model=$(RUNS)/lab/asarm_joint/export judge=$(RUNS)/lab/ar_target/export

test: .venv/installed  ## the whole test suite
	$(PY) -m pytest -n 2

lint: .venv/installed  ## ruff, as CI runs it
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

clean:
	rm -rf runs .venv
