#!/bin/sh
# A Markov head for the lab's DEER drafter: trained together with it, and alone.
#
# All three drafters go on from it for 300 steps: without a head, with a head of rank
# 64, and with a head alone while the drafter stays as it is.
#
# Needs:  pip install -c constraints.txt -e '.[train,lab]' (make quickstart installs it)
# Time:   half an hour on 2 cores, and as long again for the drafter where it is missing
# Result: acceptance length, 64 held-out prompts, 2 virtual cores of an Intel Xeon with AMX
#         (docs/results/markov_head.md):
#
#                        no head       head alone    together
#         T=0, chains    3.87 ± 0.20   4.62 ± 0.23   5.60 ± 0.21
#         T=0, trees     6.92 ± 0.30   6.87 ± 0.32   7.54 ± 0.31
#         T=1, block     3.18 ± 0.07   4.76 ± 0.11   4.76 ± 0.08
#         T=1, trees     3.51 ± 0.04   4.41 ± 0.07   5.20 ± 0.08

set -eu
PATH="$PWD/.venv/bin:$PATH"  # the environment that make quickstart makes, where there is one
RUNS="${RUNS:-runs}"
STAGE2="$RUNS/deer_stage2"

python -m trainers.fit recipe=deer_stage2 runs="$RUNS"
train() {
    python -m trainers.fit recipe=deer_stage2 runs="$RUNS" drafter="$STAGE2/export" \
        trainer.compile=true trainer.max_steps=300 "$@"
}
train name=more
train name=joint module.markov_rank=64
train name=head module.markov_rank=64 module.train_drafter=false
for name in more joint head; do
    python -m decoding.calibrate model="$STAGE2/$name/export" answers="$RUNS/deer_answers" \
        'nodes=[16]' 'sharpness=[1.0]' prompts=16 max_new_tokens=64 ignore_eos=true
done
python -m decoding.bench ignore_eos=true model="$STAGE2/more/export" \
    also="[$STAGE2/head/export,$STAGE2/joint/export]" prompts=64 max_new_tokens=64 \
    'sampler=[nodes=16]' prompt_lookup=0 generate=false 'verify=[coupled,block,tree]' \
    out="$STAGE2/bench_head"
