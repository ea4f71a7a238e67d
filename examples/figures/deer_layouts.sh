#!/bin/sh
# DEER's draft block (bidirectional, after a separator) and PARD's (causal), trained for as long.
#
# Both drafters have the same target, answers and steps: 60 of adaptation (made on the way), 100 of
# stage I, 600 of stage II, blocks of 8.
#
# Needs:  pip install -c constraints.txt -e '.[train,lab]' (make quickstart installs it)
# Time:   hours on 2 cores
# Result: acceptance length, 64 held-out prompts, 2 virtual cores of an Intel Xeon with AMX
#         (docs/results/deer_ablations.md):
#
#                          separator, bidirectional   causal (layout=pard)
#         T=0              2.30 ± 0.07                2.54 ± 0.07
#         T=1, coupled     1.77 ± 0.02                1.90 ± 0.03
#         T=1, rejection   1.92 ± 0.02                2.03 ± 0.02
#         T=1, block       2.01 ± 0.02                2.15 ± 0.03

set -eu
PATH="$PWD/.venv/bin:$PATH"  # the environment that make quickstart makes, where there is one
RUNS="${RUNS:-runs}"
FOLDER="$RUNS/lab-layouts"
TARGET="$RUNS/lab/ar_target/export"

python -m trainers.fit recipe=ar_target runs="$RUNS/lab" trainer.compile=true trainer.max_steps=2400
python -m decoding.collect recipe=deer_answers runs="$FOLDER" target="$TARGET" prompts.count=768
for layout in separator pard; do
    python -m trainers.fit recipe=deer_stage1 layout="$layout" runs="$FOLDER/$layout" \
        target="$TARGET" answers="$FOLDER/deer_answers" trainer.compile=true
    python -m trainers.fit recipe=deer_stage2 layout="$layout" runs="$FOLDER/$layout" \
        target="$TARGET" answers="$FOLDER/deer_answers" trainer.compile=true trainer.max_steps=600
done
python -m decoding.bench ignore_eos=true model="$FOLDER/separator/deer_stage2/export" \
    also="$FOLDER/pard/deer_stage2/export" prompts=64 max_new_tokens=64 \
    'verify=[coupled,rejection,block]' generate=false prompt_lookup=0 out="$FOLDER/bench"
