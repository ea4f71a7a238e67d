#!/bin/sh
# Seven drafters of SmolLM2-135M-Instruct, trained side by side on one GPU and compared on HumanEval.
#
# Copies of the same seven layers that read the states of their originals: all of them a tail, the
# last two, none, none with a Markov head; DSpark (one context for all layers); EAGLE-3 and P-EAGLE.
# All have the same answers and the same 600 steps of 32 rows.
#
# Needs:  pip install -c constraints.txt -e '.[train,lab,small]'; the network (PyPI), for the model;
#         one GPU with 80 GB, or fewer trainings at a time
# Time:   one NVIDIA H200 and 16 CPU cores: 51 seconds of decoding for 4,096 answers, four minutes for
#         all trainings together (62,000 tokens/s each); the bench on the CPU, two threads: an hour
# Result: HumanEval, 64 problems, bfloat16 on a CPU (docs/results/tail.md), tokens a target pass:
#
#         drafter             T=0, chain   T=0, tree    T=1, block   T=1, tree
#         tail of 7           3.79 ± 0.13  3.93 ± 0.13  3.01 ± 0.10  3.05 ± 0.09
#         tail of 2           3.20 ± 0.07  3.62 ± 0.13  2.53 ± 0.07  2.68 ± 0.07
#         masks, Markov head  2.84 ± 0.06  3.69 ± 0.12  2.38 ± 0.06  2.48 ± 0.05
#         masks               2.59 ± 0.05  3.46 ± 0.12  2.08 ± 0.04  2.31 ± 0.04
#         DSpark              2.60 ± 0.07  3.61 ± 0.11  2.23 ± 0.05  2.37 ± 0.06
#         EAGLE-3             2.25 ± 0.06  3.30 ± 0.11  2.06 ± 0.04  2.24 ± 0.05
#         P-EAGLE             1.79 ± 0.04  3.00 ± 0.10  1.66 ± 0.03  1.83 ± 0.03

set -eu
PATH="$PWD/.venv/bin:$PATH"  # the environment that make quickstart makes, where there is one
RUNS="${RUNS:-runs}"
FOLDER="$RUNS/small-gpu"
mkdir -p "$FOLDER"
LAYERS='network.layers=[0,1,2,11,16,18,29] network.context=layerwise'
MASKS='network.tail=0 network.causal=false'
TAIL='network.causal=true network.markov_rank=null'
HEAD='network.markov_rank=64 optimization.aux_lr=1.5e-2'

fit() {
    name="$1"
    shift
    python -m trainers.fit scale=small runs="$FOLDER" name="$name" trainer.max_steps=600 \
        trainer.batch_size=32 trainer.micro_batch_size=32 trainer.workers=2 \
        trainer.validate_every=600 acceptance.prompts=8 "$@" >"$FOLDER/$name.log" 2>&1
}

python -m decoding.collect recipe=deer_answers scale=small runs="$FOLDER" prompts.count=8192 \
    collector.device=cuda collector.at_once=1024 shard_size=2048
# shellcheck disable=SC2086  # several words each
{
    fit tail7 recipe=drafter 'then=[]' $LAYERS $TAIL network.tail=all &
    fit tail2 recipe=drafter 'then=[]' $LAYERS $TAIL network.tail=2 &
    fit masks recipe=drafter 'then=[]' $LAYERS $MASKS network.markov_rank=null &
    fit markov recipe=drafter 'then=[]' $LAYERS $MASKS $HEAD &
    fit dspark recipe=dflash layout=dspark 'network.layers=[0,1,2,11,16,18,29]' $HEAD &
}
fit eagle3 recipe=eagle3 &
fit peagle recipe=eagle3 network.parallel=true &
wait

D="$FOLDER/drafter"
E="$FOLDER/eagle3"
python -m decoding.bench model="$D/tail7/export" \
    also="[$D/tail2/export,$D/markov/export,$D/masks/export,$FOLDER/dflash/dspark/export,$E/eagle3/export,$E/peagle/export]" \
    source=humaneval prompts=64 max_new_tokens=64 'temperatures=[0,1]' \
    'verify=[coupled,block,tree]' 'batch_sizes=[16]' 'sampler=[nodes=8]' generate=false \
    prompt_lookup=0 out="$FOLDER/bench"
