#!/bin/sh
# CSpD: speculative decoding of continuous tokens, here the patches of scikit-learn's digits.
#
# It trains both heads: the mixture head (ours) with a deep target, so that a drafter of two layers
# is cheap in comparison, and the paper's diffusion head with a drafter without and with
# distillation. The benches sweep gamma, guidance, temperature and the pre-filled share.
#
# Needs:  pip install -c constraints.txt -e '.[train,lab]' (make quickstart installs it)
# Time:   15 minutes a training on 2 virtual cores of an AMD EPYC with AVX-512, other work beside
#         it; five trainings and three benches
# Result: same machine (docs/results/cspd.md):
#
#         head                  way                acceptance   images/s, batch 1   batch 8
#         mixture, gamma = 3    sequential                      4.76                27.14
#         mixture, gamma = 3    exact              0.804        8.91                50.79
#         diffusion             sequential                      2.94                18.47
#         diffusion             exact              0.525        1.93                10.50

set -eu
PATH="$PWD/.venv/bin:$PATH"  # the environment that make quickstart makes, where there is one
RUNS="${RUNS:-runs}"
FOLDER="$RUNS/lab"

target() { python -m trainers.fit recipe=cspd_target runs="$FOLDER" "$@"; }
drafter() { python -m trainers.fit recipe=cspd_draft runs="$FOLDER" "$@"; }
bench() { python -m decoding.bench.images features=digits "$@"; }

target name=deep trainer.max_steps=800 network.backbone.num_hidden_layers=24
drafter name=deep target="$FOLDER/cspd_target/deep/export" trainer.max_steps=2500 \
    network.backbone.num_hidden_layers=2 network.backbone.hidden_size=192 \
    network.backbone.intermediate_size=512 network.backbone.num_attention_heads=6 \
    module.distillation=4.0 data.corruption.repeats=8
bench model="$FOLDER/cspd_draft/deep/export" gamma=3 batches=6

target name=diffusion network.head=diffusion trainer.max_steps=1000
drafter name=diffusion target="$FOLDER/cspd_target/diffusion/export" network.head=diffusion \
    trainer.max_steps=1000
bench model="$FOLDER/cspd_draft/diffusion/export" images=64 samples=0
drafter name=distilled target="$FOLDER/cspd_target/diffusion/export" network.head=diffusion \
    trainer.max_steps=1000 module.distillation=1.0
bench model="$FOLDER/cspd_draft/distilled/export" images=64
