#!/bin/sh
# A Markov head on a real model: drafted tokens that are conditioned on the one before them.
#
# DEER drafts all tokens of a block at once, none knowing the others. A head of low rank adds a
# score for each pair of neighbours. First it is trained alone, for a drafter that stays as it is;
# then together with its drafter, compared with as many more steps without a head.
#
# Needs:  pip install -c constraints.txt -e '.[train,lab,small,cpu]' (make quickstart installs it)
# Reads:  runs/small-dflash/deer_stage2/export, runs/small-dflash/deer_answers
#         of sh examples/smollm2/dflash.sh
# Time:   three trainings of 300 steps and two calibrations: hours on 2 cores
# Result: tokens a pass on HumanEval, 64 problems (docs/results/markov_head.md). The first two columns are
#         not calibrated, on 2 virtual cores of an AMD EPYC with AVX-512; the last two are
#         calibrated, on 2 of an Intel Xeon with AMX:
#
#                            drafter       head alone    300 more steps   together
#         T=0, chains        1.68 ± 0.03   1.76 ± 0.04   1.75 ± 0.03      1.87 ± 0.04
#         T=0, trees         2.76 ± 0.10   2.83 ± 0.10   2.86 ± 0.10      2.90 ± 0.10
#         T=1, block         1.53 ± 0.01   1.65 ± 0.02   1.61 ± 0.02      1.68 ± 0.02
#         T=1, trees         1.71 ± 0.02   1.77 ± 0.02   1.98 ± 0.03      1.98 ± 0.02

set -eu
PATH="$PWD/.venv/bin:$PATH"  # the environment that make quickstart makes, where there is one
RUNS="${RUNS:-runs}"
FOLDER="$RUNS/small-dflash"
DRAFTER="$FOLDER/deer_stage2"

train() {
    python -m trainers.fit recipe=deer_stage2 scale=small runs="$FOLDER" trainer.compile=true \
        drafter="$DRAFTER/export" trainer.max_steps=300 "$@"
}
bench() {
    python -m decoding.bench source=humaneval prompts=64 max_new_tokens=128 'batch_sizes=[16]' \
        'temperatures=[0,1]' 'verify=[coupled,block,tree]' generate=false prompt_lookup=0 "$@"
}

# The head alone.
train name=head module.markov_rank=64 module.train_drafter=false optimization.aux_lr=1.0e-2
bench model="$DRAFTER/export" also="$DRAFTER/head/export" 'sampler=[nodes=8]' \
    out="$FOLDER/bench_head"

# Together with its drafter.
train name=more_300 module.soft=1.0
train name=joint module.soft=1.0 module.markov_rank=64
for name in more_300 joint; do
    python -m decoding.calibrate model="$DRAFTER/$name/export" answers="$FOLDER/deer_answers" \
        source=functions 'nodes=[8]' 'sharpness=[1.0]' 'lengths=[8]' prompts=6 max_new_tokens=64
done
bench model="$DRAFTER/more_300/export" also="$DRAFTER/joint/export" out="$DRAFTER/bench_joint"
