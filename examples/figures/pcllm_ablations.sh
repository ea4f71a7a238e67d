#!/bin/sh
# pcLLM's mask, noise and window (Tables 3 and 4) and CLLM* (Table 1): a short round 1 each.
#
# Needs:  pip install -c constraints.txt -e '.[train,lab]' (make quickstart installs it)
# Time:   seven trainings of 400 steps after those of the target: hours on 2 cores
# Result: tokens per forward of plain Jacobi decoding, n = 16, T=0, 64 held-out prompts, 2 virtual
#         cores of an Intel Xeon with AMX, and the loss on the held-out corpus against the target's
#         (docs/results/pcllm.md):
#
#         mask, noise, window               tokens per forward   loss
#         NC, linear, 8                     1.35 ± 0.04          +8.5%
#         NC, linear, 4                     1.35 ± 0.03          +8.3%
#         NC-IC, linear, 4                  1.30 ± 0.03          +8.4%
#         CLLM* (NC-IC, any state, 1)       1.43 ± 0.04          +9.8%

set -eu
PATH="$PWD/.venv/bin:$PATH"  # the environment that make quickstart makes, where there is one
RUNS="${RUNS:-runs}"
FOLDER="$RUNS/lab"
ROUND1="$FOLDER/pcllm_round1"

python -m trainers.fit recipe=ar_target runs="$FOLDER" trainer.compile=true trainer.max_steps=2400
python -m decoding.collect recipe=pcllm_trajectories runs="$FOLDER" prompts.count=1920

train() {
    python -m trainers.fit recipe=pcllm_round1 runs="$FOLDER" trainer.compile=true \
        trainer.max_steps=400 "$@"
}
train name=linear_8
train name=linear_4 data.corruption.window=4
train name=nc_ic_4 data.corruption.window=4 module.mask=nc_ic
train name=random_8 data.corruption.order=random
train name=random_4 data.corruption.order=random data.corruption.window=4
train name=reverse_8 data.corruption.order=reverse
train name=cllm module.mask=nc_ic module.window=1 data.corruption.state=any

OTHERS="$ROUND1/linear_4/export,$ROUND1/nc_ic_4/export,$ROUND1/random_8/export"
OTHERS_TOO="$ROUND1/random_4/export,$ROUND1/reverse_8/export,$ROUND1/cllm/export"
python -m decoding.bench ignore_eos=true model="$ROUND1/linear_8/export" \
    also="[$OTHERS,$OTHERS_TOO]" 'sampler=[method=jacobi,block_size=16]' 'temperatures=[0]' \
    prompts=64 prompt_lookup=0 out="$ROUND1/ablations"
python -m decoding.bench.heldout_loss model="$FOLDER/ar_target/export" runs="$FOLDER" \
    answers="$FOLDER/pcllm_trajectories" also="[$ROUND1/linear_8/export,$OTHERS,$OTHERS_TOO]" \
    out="$ROUND1/ablations/heldout_loss"
