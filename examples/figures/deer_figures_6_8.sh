#!/bin/sh
# DEER's Figures 6 and 8 at lab scale: the base of stage II's weights, and the block size.
#
# Figure 6 trains on suffixes of up to 96 masked tokens, as published, with weights alpha^(R-i): its
# result is whether the loss in metrics.csv drifts. Figure 8 trains and decodes with blocks of 4 to
# 32 tokens.
#
# Needs:  pip install -c constraints.txt -e '.[train,lab]' (make quickstart installs it)
# Time:   seven trainings of 300 steps and a bench, after deer_inputs.sh: hours on 2 cores
# Result: alpha = 1.01, 1.02 and 1.05 converge alike (validation loss 3.45, 3.48, 3.43). Acceptance
#         length by block size, 2 virtual cores of an Intel Xeon with AMX (docs/results/deer_ablations.md):
#
#                        4             8             16            32
#         T=0, chains    2.71 ± 0.11   2.93 ± 0.16   3.01 ± 0.19   3.08 ± 0.21
#         T=0, trees     4.50 ± 0.20   4.58 ± 0.21   4.57 ± 0.22   4.55 ± 0.22
#         T=1, block     2.21 ± 0.03   2.16 ± 0.03   2.21 ± 0.03   2.18 ± 0.03

set -eu
PATH="$PWD/.venv/bin:$PATH"  # the environment that make quickstart makes, where there is one
RUNS="${RUNS:-runs}"
STAGE2="$RUNS/lab-deer/deer_stage2"

sh examples/figures/deer_inputs.sh

train() {
    python -m trainers.fit recipe=deer_stage2 runs="$RUNS/lab-deer" trainer.compile=true \
        trainer.max_steps=300 "$@"
}
for alpha in 1.01 1.02 1.05; do
    train name="alpha_$alpha" module.alpha="$alpha" module.soft=0.0 data.corruption.anchors=4 \
        data.corruption.length=96 data.corruption.schedule.shortest=1
done
for size in 4 8 16 32; do
    train name="block_$size" module.block_size="$size" data.corruption.length="$size" \
        data.corruption.schedule.shortest="$size"
done
python -m decoding.bench ignore_eos=true model="$STAGE2/block_4/export" \
    also="[$STAGE2/block_8/export,$STAGE2/block_16/export,$STAGE2/block_32/export]" prompts=64 \
    max_new_tokens=64 prompt_lookup=0 out="$STAGE2/blocks"
