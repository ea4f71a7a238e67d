#!/bin/sh
# DEER's trees on SmolLM2-135M-Instruct, compared with transformers on three benchmarks.
#
# The drafter is that of 1,200 steps on the answers to 4,096 docstring prompts. transformers'
# assisted generation has an autoregressive drafter that was trained on the same answers.
#
# Needs:  pip install -c constraints.txt -e '.[train,lab,small,cpu]' (make quickstart installs it);
#         gsm8k.jsonl and mt_bench.jsonl, the files of those benchmarks, in this folder
# Reads:  runs/small/deer_stage2/steps_1200/export, runs/small/deer_answers/more
#         of sh examples/figures/smollm2_scaling.sh
# Time:   20 minutes for the assistant and 8 for the calibration, on 2 virtual cores of an AMD EPYC
#         with AVX-512; and the benches
# Result: times plain decoding, same machine, two threads, drafters of layers 0, 1 and 29
#         (network.layers is 7 now); in brackets the acceptance length (docs/results/small.md):
#
#         sampler                     HumanEval, T=0       HumanEval, T=1
#         transformers assisted       0.76 ± 0.03 (1.56)   0.77 ± 0.02 (1.47)
#         transformers prompt lookup  1.29 ± 0.09 (1.98)   0.91 ± 0.02 (1.35)
#         deer, tree                  1.76 ± 0.07 (2.90)   1.18 ± 0.03 (1.77)
#         deer, tree, GSM8K           1.46 ± 0.04 (2.19)   1.07 ± 0.02 (1.56)
#         deer, tree, MT-Bench        1.26 ± 0.06 (1.95)   1.00 ± 0.03 (1.50)

set -eu
PATH="$PWD/.venv/bin:$PATH"  # the environment that make quickstart makes, where there is one
RUNS="${RUNS:-runs}"
FOLDER="$RUNS/small"
DRAFTER="$FOLDER/deer_stage2/steps_1200"

python -m trainers.fit recipe=ar_drafter scale=small runs="$FOLDER" trainer.compile=true \
    answers="$FOLDER/deer_answers/more" trainer.max_steps=600
python -m decoding.calibrate model="$DRAFTER/export" answers="$FOLDER/deer_answers/more" \
    source=docstrings 'nodes=[8,12,16]' 'sharpness=[1.0]'

bench() {
    python -m decoding.bench model="$DRAFTER/export" prompts=64 max_new_tokens=128 \
        'verify=[tree]' generate=false "$@"
}
bench source=humaneval assistant="$FOLDER/ar_drafter/export"
bench source=humaneval 'temperatures=[0.7,1]' 'sampler=[nodes=12]' prompt_lookup=0 \
    out="$DRAFTER/bench_12_nodes"
for source in gsm8k.jsonl mt_bench.jsonl; do
    bench source="$source" prompt_lookup=0 out="$DRAFTER/bench_$source"
done
