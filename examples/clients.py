"""Tokens a second and waiting times of a server, by how many clients ask at once.

    python -m decoding.serve model=org/drafter at_once=32 prefix_gb=0
    python examples/clients.py http://127.0.0.1:8000/v1 prompts.jsonl
    python examples/clients.py http://127.0.0.1:8000/v1 prompts.jsonl 8,16 schema.json

The models of the server take turns with the same prompts, so none is kept for the next model;
`prompts.jsonl` has a `prompt` in each line. With a JSON schema all answers follow it. Any server of
OpenAI's protocol will do.
"""

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, islice
from pathlib import Path
from statistics import quantiles

from openai import OpenAI


def main(
    address: str, file: str, clients: str = "1,2,4,8,16,32", schema: str | None = None
) -> None:
    """Ask as so many clients, and print a line for each model."""
    client = OpenAI(base_url=address, api_key="none", timeout=600, max_retries=0)
    prompts = [json.loads(line)["prompt"] for line in Path(file).read_text().splitlines()]
    models = [m.id for m in client.models.list().data]
    form: dict = {}
    if schema is not None:
        named = {"name": "answer", "schema": json.loads(Path(schema).read_text())}
        form = {"response_format": {"type": "json_schema", "json_schema": named}}

    def answer(model: str, prompt: str) -> tuple[int, float, float]:
        """Return the tokens of an answer, and the seconds to its first piece and in all."""
        started, first, tokens = time.perf_counter(), 0.0, 0
        for piece in client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": prompt}],
            max_tokens=64,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            **form,
        ):
            if piece.choices and piece.choices[0].delta.content:
                first = first or time.perf_counter() - started
            tokens = piece.usage.completion_tokens if piece.usage else tokens
        return tokens, first, time.perf_counter() - started

    for count in map(int, clients.split(",")):
        asked = [*islice(cycle(prompts), max(32, 4 * count))]
        for model in models:
            with ThreadPoolExecutor(count) as pool:
                list(pool.map(answer, [model] * count, prompts[-count:]))  # warms up
                started = time.perf_counter()
                found = [*pool.map(answer, [model] * len(asked), asked)]
                seconds = time.perf_counter() - started
            tokens, firsts, wholes = zip(*found)
            p95 = [quantiles(x, n=20)[-1] for x in (firsts, wholes)]
            print(
                f"{count} clients, {model}: {sum(tokens) / seconds:.1f} tokens/s, p95 of the "
                f"first piece {p95[0]:.2f} s, of an answer {p95[1]:.2f} s",
                flush=True,
            )


if __name__ == "__main__":
    main(*sys.argv[1:])
