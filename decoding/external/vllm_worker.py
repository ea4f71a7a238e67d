"""A vLLM engine in a process of its own: JSON lines in, JSON lines out.

It runs with the interpreter of vLLM's environment, in which parade need not be installed, so it
imports nothing of parade (`decoding.external.vllm_engine` starts it and talks to it).

The first line has the arguments of `vllm.LLM` and is answered by `{"vllm": version}`; each further
line is a job, `{"prompts": [[token id]], "params": [{...}]}`, answered by

- `answers`: `{"token_ids", "finish_reason", "top"}` of each prompt; `top`, if the parameters ask
  for `logprobs`, has [[token id, log-probability]] of each token, most probable first; `states`,
  if a connector writes hidden states, is the path of their file; or
  `{"refused": one line}` for a prompt that is longer than the engine's context;
- `seconds`: of the whole job;
- `drafts`: increments of vLLM's counters of speculative decoding in the job;

or by `{"error": one line}`.
"""

import json
import os
import sys
import time

PREFIX = "vllm:spec_decode_num_"


def counters(llm) -> dict[str, list[int]]:
    """Return vLLM's counters of speculative decoding: one number, or one for each position."""
    found = {}
    for metric in llm.get_metrics():
        if metric.name.startswith(PREFIX):
            values = getattr(metric, "values", None)
            found[metric.name[len(PREFIX) :]] = list(values) if values else [metric.value]
    return found


def answer(output, logprobs: int) -> dict:
    """Return the first completion of a request, as plain values."""
    completion = output.outputs[0]
    found = {"token_ids": [*completion.token_ids], "finish_reason": completion.finish_reason}
    states = (getattr(output, "kv_transfer_params", None) or {}).get("hidden_states_path")
    if states is not None:
        found["states"] = states
    if logprobs:
        found["top"] = [
            sorted(([t, p.logprob] for t, p in step.items()), key=lambda pair: -pair[1])[:logprobs]
            for step in completion.logprobs
        ]
    return found


def run(llm, job: dict) -> dict:
    """Decode the prompts of a job together."""
    from vllm import SamplingParams

    before, started = counters(llm), time.perf_counter()
    params = [SamplingParams(detokenize=False, **p) for p in job["params"]]
    # One that is too long ends the whole call.
    config = getattr(getattr(llm, "llm_engine", None), "model_config", None)
    limit = getattr(config, "max_model_len", None) or float("inf")
    sizes = [len(ids) for ids in job["prompts"]]
    prompts = [{"prompt_token_ids": ids} for ids in job["prompts"] if len(ids) < limit]
    params = [p for p, size in zip(params, sizes) if size < limit]
    outputs = iter(llm.generate(prompts, params, use_tqdm=False) if prompts else [])
    seconds = time.perf_counter() - started
    drafts = {}
    for name, after in counters(llm).items():
        grown = [a - b for a, b in zip(after, before.get(name, [0] * len(after)))]
        drafts[name] = grown if name.endswith("per_pos") else grown[0]
    logprobs = job["params"][0]["logprobs"] or 0
    answers = [
        answer(next(outputs), logprobs)
        if size < limit
        else {"refused": f"the prompt has {size} tokens, and the engine's context {limit}"}
        for size in sizes
    ]
    return {"answers": answers, "seconds": seconds, "drafts": drafts}


def main() -> None:
    """Serve jobs until standard input ends."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what vLLM prints is no reply

    def reply(content: dict) -> None:
        replies.write(json.dumps(content) + "\n")

    try:
        options = json.loads(sys.stdin.readline())
        import vllm

        llm = vllm.LLM(**options)
    except Exception as error:
        reply({"error": f"{type(error).__name__}: {error}"})
        return
    reply({"vllm": vllm.__version__})
    for line in sys.stdin:
        try:
            reply(run(llm, json.loads(line)))
        except Exception as error:
            reply({"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":  # vLLM starts processes that import this file
    main()
