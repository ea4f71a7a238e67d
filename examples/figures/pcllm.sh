#!/bin/sh
# pcLLM's two rounds at lab scale: tokens per forward, speed, and what the new weights cost.
#
# Round 1 trains on the target's own trajectories in blocks of 16, round 2 on those of round 1's
# model in blocks of 32. The benches decode with Jacobi and with multi-block decoding, the untrained
# target too; the held-out loss says what the training changed in ordinary text.
#
# Needs:  pip install -c constraints.txt -e '.[train,lab]' (make quickstart installs it)
# Time:   33 minutes for round 1, 23 for the second collection and 108 for round 2, each on one of 2
#         virtual cores of an AMD EPYC with AVX-512, other work on the other one; and the target
#         with its trajectories
# Result: T=0, 16 held-out prompts, same machine (docs/results/pcllm.md):
#
#         sampler of round 2's model             tokens per forward   times plain
#         jacobi, n = 8                          1.97                 1.55
#         jacobi_mr, n = 16, K = 2, pool of 8    2.61
#
#         Loss on the held-out corpus: 3.983 before, 4.080 after round 2 (+2.4%).

set -eu
PATH="$PWD/.venv/bin:$PATH"  # the environment that make quickstart makes, where there is one
RUNS="${RUNS:-runs}"
FOLDER="$RUNS/lab"
TARGET="$FOLDER/ar_target"
ROUND="$FOLDER/pcllm_round"

fit() { python -m trainers.fit runs="$FOLDER" trainer.compile=true "$@"; }
collect() {
    python -m decoding.collect recipe=pcllm_trajectories runs="$FOLDER" prompts.count=1920 "$@"
}
bench() { python -m decoding.bench ignore_eos=true "$@"; }

fit recipe=ar_target trainer.max_steps=2400
collect
fit recipe=pcllm_round1 trainer.max_steps=1000 data.train.share=0.5
collect name=round2 target="${ROUND}1/export" collector.block_size=32
fit recipe=pcllm_round2 trainer.max_steps=2000 optimization.lr=1.0e-3 data.train.share=0.65

bench model="$TARGET/export" 'sampler=[method=jacobi,block_size=16]' out="$TARGET/bench_jacobi"
bench model="${ROUND}2/export" also="${ROUND}1/export" 'sampler=[method=jacobi,block_size=8]' \
    out="${ROUND}2/bench_jacobi"
bench model="${ROUND}2/export" also="${ROUND}1/export" \
    'sampler=[method=jacobi_mr,block_size=16,blocks=2,pool_size=8]'
python -m decoding.bench.heldout_loss model="$TARGET/export" runs="$FOLDER" \
    answers="$FOLDER/pcllm_trajectories" also="[${ROUND}1/export,${ROUND}2/export]" \
    out="${ROUND}2/heldout_loss"
