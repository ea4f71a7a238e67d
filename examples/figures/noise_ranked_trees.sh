#!/bin/sh
# Noise-ranked trees, without and with noise and bigrams, against drawn trees and chains.
#
# Acceptance length at equal numbers of nodes, of the lab's DEER drafter. It does not depend on
# the batch, so sixteen prompts are decoded at a time.
#
# Needs:  pip install -c constraints.txt -e '.[train,lab]' (make quickstart installs it)
# Time:   an hour on 2 cores, and another half for the drafter where it is missing
# Result: 16 nodes, 64 held-out prompts, 2 virtual cores of an Intel Xeon with AMX
#         (docs/explanation/noise_ranked_trees.md):
#
#         verify                T=0.3         T=0.7         T=1.0         T=1.5
#         multipath             2.78 ± 0.11   2.43 ± 0.03   3.21 ± 0.06   4.71 ± 0.10
#         traversal             2.88 ± 0.11   2.53 ± 0.03   3.30 ± 0.07   5.18 ± 0.10
#         tree, without noise   2.70 ± 0.10   1.73 ± 0.02   1.37 ± 0.01   1.10 ± 0.01
#         tree                  2.99 ± 0.12   2.61 ± 0.02   2.78 ± 0.02   2.98 ± 0.02
#         tree, calibrated      4.14 ± 0.12   3.03 ± 0.05   3.31 ± 0.04   4.58 ± 0.07

set -eu
PATH="$PWD/.venv/bin:$PATH"  # the environment that make quickstart makes, where there is one
RUNS="${RUNS:-runs}"
STAGE2="$RUNS/deer_stage2"

python -m trainers.fit recipe=deer_stage2 runs="$RUNS"
python -m decoding.calibrate model="$STAGE2/export" answers="$RUNS/deer_answers" 'nodes=[16]' \
    'sharpness=[1.0]' prompts=16 max_new_tokens=64 ignore_eos=true 'lengths=[]' \
    'temperatures=[0.3,0.7,1.0,1.5]'

bench() {
    python -m decoding.bench ignore_eos=true model="$STAGE2/export" prompts=64 max_new_tokens=64 \
        'batch_sizes=[16]' 'temperatures=[0.3,0.7,1.0,1.5]' generate=false prompt_lookup=0 "$@"
}
bench 'verify=[coupled,rejection,block]' out="$STAGE2/ranked/chains"
for nodes in 4 8 16 32; do
    bench 'verify=[tree]' 'drawn=[traversal,multipath]' \
        sampler="[nodes=$nodes,sharpness=1.0,bigrams=false]" out="$STAGE2/ranked/$nodes"
    bench 'verify=[tree]' sampler="[nodes=$nodes,sharpness=1.0,bigrams=false,rank_noise=false]" \
        out="$STAGE2/ranked/${nodes}_without_noise"
    bench 'verify=[tree]' sampler="[nodes=$nodes]" out="$STAGE2/ranked/${nodes}_bigrams"
done
