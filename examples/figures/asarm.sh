#!/bin/sh
# AS-ARM: a model that fills holes in any order, with speculative decoding by itself (ASSD).
#
# It trains a two-stream model from the lab's target and fills held-out windows, of which 95% of the
# tokens are hidden: with each sampler and draft length, with trees of drafts, one window at a time
# (for seconds), and at 1,024 tokens with and without the cache. The last two benches compare the
# calls of assd_fused with trees to sequential decoding on the same windows: one ratio, its error.
#
# Needs:  pip install -c constraints.txt -e '.[train,lab]' (make quickstart installs it)
# Time:   37 minutes for asarm_joint on 2 virtual cores of an AMD EPYC with AVX-512; with the target
#         and the benches hours
# Result: windows of 256 tokens, T=1, same machine (docs/results/asarm.md):
#
#         sampler                               calls / sequential   perplexity
#         sequential                            1.0                  91.6 ± 3.1
#         assd, k = 5                           0.837                97.3 ± 3.2
#         assd_ngram, k = 5                     0.886                96.1 ± 3.3
#         assd_fused, k = 5                     0.705                91.9 ± 3.3
#         assd_fused, trees of 16 (64 windows)  0.567                97.0 ± 4.5

set -eu
PATH="$PWD/.venv/bin:$PATH"  # the environment that make quickstart makes, where there is one
RUNS="${RUNS:-runs}"
FOLDER="$RUNS/lab"
MODEL="$FOLDER/asarm_joint"

fit() { python -m trainers.fit runs="$FOLDER" trainer.compile=true "$@"; }

fit recipe=ar_target trainer.max_steps=2400
fit recipe=asarm_joint trainer.max_steps=1600 data.corruption.curriculum=200

infill() {
    python -m decoding.bench.infill model="$MODEL/export" judge="$FOLDER/ar_target/export" "$@"
}
infill 'block_sizes=[3,5]'
infill 'block_sizes=[4]' 'nodes=[8,16]' out="$MODEL/bench_trees"
infill 'block_sizes=[2,3,4,5,8]' samples=16 batch_size=1 out="$MODEL/bench_1"
infill 'block_sizes=[5]' length=1024 hidden=0.125 samples=4 batch_size=1 \
    'knobs=[cache=true,cache=false]' out="$MODEL/bench_cache"

calls() {
    python -m decoding.bench.infill model="$MODEL/export" judge=null 'drafts=[sequential]' \
        'block_sizes=[4]' 'nodes=[16]' samples=64 "$@"
}
calls out="$MODEL/bench_ratio"
calls packed=true length=512 batch_size=4 out="$MODEL/bench_ratio_512"
