#!/bin/sh
# DEER's speed and acceptance length at lab scale, compared with transformers.
#
# It trains DEER's drafter and, for transformers' assisted generation, an autoregressive drafter of
# the same three layers on the same answers; calibrates trees of 5 to 48 nodes; decodes held-out
# prompts one and sixteen at a time; and compares stages I and II.
#
# Needs:  pip install -c constraints.txt -e '.[train,lab]' (make quickstart installs it)
# Time:   more than an hour on 2 cores
# Result: tokens/s, one prompt at a time, 2 virtual cores of an Intel Xeon with AMX; in brackets the
#         acceptance length (docs/results/deer.md):
#
#         sampler                     T=0            T=1
#         plain                        91.6 (1.0)     77.8 (1.0)
#         transformers assisted       101.2 (4.96)    52.7 (2.61)
#         transformers prompt lookup  134.4 (1.72)    70.1 (1.03)
#         deer, chains (T=1: block)   188.3 (3.17)   122.0 (2.47)
#         deer, tree                  262.2 (5.74)   139.5 (3.34)
#
# python -m docs.figures.speedup draws the picture of the table on the page.

set -eu
PATH="$PWD/.venv/bin:$PATH"  # the environment that make quickstart makes, where there is one
RUNS="${RUNS:-runs}"
STAGE="$RUNS/lab-deer/deer_stage"

sh examples/figures/deer_inputs.sh

fit() { python -m trainers.fit runs="$RUNS/lab-deer" trainer.compile=true "$@"; }

fit recipe=deer_stage2 trainer.max_steps=1500
fit recipe=ar_drafter trainer.max_steps=2000 'network.layers=[0,1,11]'
python -m decoding.calibrate ignore_eos=true model="${STAGE}2/export" \
    answers="$RUNS/lab-deer/deer_answers" 'nodes=[5,8,12,20,32,48]' 'sharpness=[1.0]' \
    'batch_sizes=[1,16]' prompts=16
python -m decoding.bench ignore_eos=true model="${STAGE}2/export" \
    assistant="$RUNS/lab-deer/ar_drafter/export" 'batch_sizes=[1,16]' max_new_tokens=64
python -m decoding.bench ignore_eos=true model="${STAGE}2/export" also="${STAGE}1/export" \
    prompt_lookup=0 out="${STAGE}2/bench_stages"
