#!/bin/sh
# The inputs of the DEER figures: a target, its answers to 1,920 prompts, a drafter after stage I.
#
# The other deer_*.sh scripts run this one first; what is finished is not done again. The target is
# deep (12 layers), so that a drafter with a quarter of its layers is cheap in comparison.
#
# Needs:  pip install -c constraints.txt -e '.[train,lab]' (make quickstart installs it)
# Time:   a part of deer.sh, which takes more than an hour on 2 cores
# Result: ar_target (23 million parameters), deer_answers, diffusion_adapt and deer_stage1 in
#         runs/lab-deer

set -eu
PATH="$PWD/.venv/bin:$PATH"  # the environment that make quickstart makes, where there is one
RUNS="${RUNS:-runs}"

fit() { python -m trainers.fit runs="$RUNS/lab-deer" trainer.compile=true "$@"; }

fit recipe=ar_target trainer.max_steps=1200 network.num_hidden_layers=12
fit recipe=diffusion_adapt trainer.max_steps=400 'network.layers=[0,1,11]'
python -m decoding.collect recipe=deer_answers runs="$RUNS/lab-deer" prompts.count=1920
fit recipe=deer_stage1 trainer.max_steps=500
