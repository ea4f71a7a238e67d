#!/bin/sh
# DEER's stage II with each of its losses: the target's distributions, or drawn tokens alone.
#
# Needs:  pip install -c constraints.txt -e '.[train,lab]' (make quickstart installs it)
# Time:   three trainings of 300 steps and a bench, after deer_inputs.sh
# Result: acceptance length of 16 held-out prompts, 2 virtual cores of an AMD EPYC with AVX-512
#         (docs/results/deer_ablations.md):
#
#         loss                    T=0    T=0, tree   T=1, block   T=1, tree
#         kl                      2.81   3.48        2.28         2.59
#         total variation         2.99   3.64        2.30         2.56
#         drawn tokens (paper)    3.11   4.00        1.99         2.42

set -eu
PATH="$PWD/.venv/bin:$PATH"  # the environment that make quickstart makes, where there is one
RUNS="${RUNS:-runs}"
STAGE2="$RUNS/lab-deer/deer_stage2"

sh examples/figures/deer_inputs.sh

train() {
    python -m trainers.fit recipe=deer_stage2 runs="$RUNS/lab-deer" trainer.compile=true \
        trainer.max_steps=300 "$@"
}
train name=kl
train name=tokens module.soft=0.0
train name=total_variation module.teacher_loss=total_variation
python -m decoding.bench ignore_eos=true model="$STAGE2/kl/export" \
    also="[$STAGE2/tokens/export,$STAGE2/total_variation/export]" prompts=32 prompt_lookup=0 \
    out="$STAGE2/losses"
