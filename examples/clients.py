"""Tokens a second and waiting times of a server, by how many clients ask at once.

    python -m decoding.serve model=org/drafter at_once=32 prefix_gb=0
    python examples/clients.py http://127.0.0.1:8000/v1 prompts.jsonl

The models of the server take turns with the same prompts, so none is kept for the next model;
`prompts.jsonl` has a `prompt` in each line.
"""

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, islice
from pathlib import Path
from statistics import quantiles

from openai import OpenAI

CLIENTS = (1, 2, 4, 8, 16, 32)


def main(address: str, file: str) -> None:
    """Ask as so many clients, and print a line for each model."""
    client = OpenAI(base_url=address, api_key="none", timeout=600, max_retries=0)
    prompts = [json.loads(line)["prompt"] for line in Path(file).read_text().splitlines()]
    models = [m.id for m in client.models.list().data]

    def answer(model: str, prompt: str) -> tuple[int, float, float]:
        """Return the tokens of an answer, and the seconds to its first piece and in all."""
        started, first, tokens = time.perf_counter(), 0.0, 0
        for piece in client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": prompt}],
            max_tokens=64,
            temperature=0,
            stream=True,
        ):
            first = first or time.perf_counter() - started
            tokens += piece.choices[0].model_extra["tokens"]
        return tokens, first, time.perf_counter() - started

    for clients in CLIENTS:
        asked = [*islice(cycle(prompts), max(8, 2 * clients))]
        for model in models:
            with ThreadPoolExecutor(clients) as pool:
                list(pool.map(answer, [model] * clients, prompts[-clients:]))  # warms up
                started = time.perf_counter()
                found = [*pool.map(answer, [model] * len(asked), asked)]
                seconds = time.perf_counter() - started
            tokens, firsts, wholes = zip(*found)
            p95 = [quantiles(x, n=20)[-1] for x in (firsts, wholes)]
            print(
                f"{clients} clients, {model}: {sum(tokens) / seconds:.1f} tokens/s, p95 of the "
                f"first piece {p95[0]:.2f} s, of an answer {p95[1]:.2f} s",
                flush=True,
            )


if __name__ == "__main__":
    main(*sys.argv[1:])
