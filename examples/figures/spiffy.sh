#!/bin/sh
# Spiffy: a masked diffusion LM that drafts for itself with a calibrated graph of guesses.
#
# The model is trained from the lab's target, then on greedy answers, the target's and its own: a
# diffusion LM is as confident at T=0 as its training text. Then graphs are calibrated: with each
# objective, of 3, 5, 8 and 10 nodes, from few prompts, for a confidence threshold, and for several
# tokens a step; and measured on held-out prompts.
#
# Needs:  pip install -c constraints.txt -e '.[train,lab]' (make quickstart installs it)
# Time:   76, 66, 14 and 47 minutes for the trainings of dllm_block, 17, 13 and 41 for the
#         collections, each on one of 2 virtual cores of an AMD EPYC with AVX-512, other work on the
#         other one; and the target, the graphs and the benches
# Result: times fewer passes than vanilla denoising, T=0, 64 held-out prompts of 128 new tokens
#         (docs/results/spiffy.md):
#
#         10 nodes, one token a step, the graph alone            2.54
#         another, shorter training, next block drafted too:
#         one token a step                                       2.32
#         two tokens a step                                      1.45
#         four tokens a step                                     1.12
#
#         Seconds: 0.47 of vanilla denoising's speed, since a CPU pays for wide passes.

set -eu
PATH="$PWD/.venv/bin:$PATH"  # the environment that make quickstart makes, where there is one
RUNS="${RUNS:-runs}"
FOLDER="$RUNS/lab"
MODEL="$FOLDER/dllm_block"
GRAPHS="$FOLDER/spiffy_calibrate"

fit() { python -m trainers.fit runs="$FOLDER" "$@"; }

fit recipe=ar_target trainer.compile=true trainer.max_steps=2400
fit recipe=dllm_block trainer.compile=true trainer.max_steps=1600

# answer NAME MODEL PROMPTS LENGTH: collect a model's greedy answers to prompts of that length.
answer() {
    python -m decoding.collect recipe=deer_answers runs="$FOLDER" name="$1" target="$2/export" \
        prompts.count="$3" prompts.length="$4" collector.number=1 'collector.temperatures=[0.0]'
}
# train_on NAME START STEPS EVERY: train on these answers from a model's weights, and validate.
train_on() {
    fit recipe=dllm_block trainer.compile=true name="$1" start="$2/export" \
        trainer.max_steps="$3" trainer.validate_every="$4" \
        data.train._target_=data.rows.documents.answers \
        data.train.source="$FOLDER/deer_answers/$1" \
        data.validation._target_=data.rows.documents.answers \
        data.validation.source="$FOLDER/deer_answers/$1"
}
answer greedy "$FOLDER/ar_target" 4096 64
train_on greedy "$MODEL" 1000 250
answer own "$MODEL/greedy" 768 64
train_on own "$MODEL/greedy" 300 150
answer own2 "$MODEL/own" 1280 72
train_on own2 "$MODEL/own" 500 250

# The graphs. The vanilla decodes that they are made from are shared, in runs/lab/traces.
calibrate() { fit recipe=spiffy_calibrate model="$MODEL/own2/export" "$@"; }

calibrate
calibrate name=few data.train.count=20 trainer.max_steps=2
for objective in degree0 degree1 total; do
    calibrate name="$objective" module.objective="$objective" module.top=3
done
for nodes in 3 5 8; do
    calibrate name="replay-$nodes" module.nodes="$nodes"
    calibrate name="degree1-$nodes" module.objective=degree1 module.top=3 module.nodes="$nodes"
done
calibrate name=threshold +module.sampling.threshold=0.9
calibrate name=threshold_alone +module.sampling.threshold=0.9 +module.sampling.next_block=false

# The benches.
denoise() { python -m decoding.bench.denoise ignore_eos=true "$@"; }

denoise model="$GRAPHS/export" also="[$GRAPHS/few/export]"
denoise model="$GRAPHS/export" \
    also="[$GRAPHS/degree0/export,$GRAPHS/degree1/export,$GRAPHS/total/export]" prompts=24 \
    out="$GRAPHS/bench_objectives"
THREE="$GRAPHS/degree1-3/export"
FIVE="$GRAPHS/replay-5/export,$GRAPHS/degree1-5/export"
EIGHT="$GRAPHS/replay-8/export,$GRAPHS/degree1-8/export"
denoise model="$GRAPHS/replay-3/export" also="[$THREE,$FIVE,$EIGHT]" prompts=24
denoise model="$GRAPHS/threshold/export" also="[$GRAPHS/threshold_alone/export]"
for tokens in 2 4; do
    calibrate name="rate_$tokens" +module.sampling.tokens_per_step="$tokens"
    denoise model="$GRAPHS/rate_$tokens/export"
done
denoise model="$GRAPHS/export" 'sampler=[next_block=false]' out="$GRAPHS/bench_alone"
