"""`python -m decoding.bench.batching model=runs/deer_stage2/export`: batches that wait, and not.

The same prompts by batches that begin together and wait for their slowest request, and by as many
at once where the next prompt takes the place of one that has ended. The texts are the same.
"""

import random
from dataclasses import dataclass
from operator import itemgetter
from time import perf_counter
from typing import ClassVar

from data.text.prompts import heldout_prompts
from decoding.bench.options import results_folder
from decoding.commands.cli import main, parse, quiet
from decoding.commands.options import DTYPES, LoadOptions, PromptOptions, option
from decoding.commands.progress import track
from decoding.commands.report import results, write_table
from decoding.engine.params import KEYED, Result, SamplingParams
from decoding.engine.sampler import Sampler
from decoding.loading import load
from decoding.samplers.plain import PlainSampler


@dataclass(frozen=True, kw_only=True)
class Batching(PromptOptions, LoadOptions):
    """Decode held-out prompts in batches that wait for their slowest request, and without.

    The requests' max_new_tokens are spread evenly from `shortest` to `max_new_tokens`, in an order
    drawn from the seed.
    """

    EXAMPLE: ClassVar[str] = "model=runs/deer_stage2/export source=humaneval at_once=16"

    prompts: int = option(64, "how many held-out prompts", least=1)
    at_once: int = option(16, "prompts that are decoded together", least=1)
    shortest: int = option(8, "max_new_tokens of the shortest request", least=1)
    temperatures: tuple[float, ...] = option((0.0, 1.0), "of the sampling; 0 is greedy", least=0)
    verify: str = option("tree", "how the export's drafts are verified", choices=KEYED)
    dtype: str = option("bfloat16", "of the weights in memory", choices=DTYPES)
    repeats: int = option(1, "times that all is measured; the fastest counts", least=1)

    def __post_init__(self):
        super().__post_init__()
        if self.shortest > self.max_new_tokens:
            raise ValueError(
                f"shortest={self.shortest} is not allowed: at most max_new_tokens="
                f"{self.max_new_tokens}"
            )


def run(argv: list[str]) -> None:
    """Run the command with its arguments `key=value`."""
    quiet()
    b = parse(argv, Batching, "decoding.bench.batching")
    own = load(b.model, **b.loading)
    if own.bench != "decoding.bench":
        raise ValueError(
            f"{b.model} does not decode token by token: python -m {own.bench} model={b.model}"
        )
    prompts = heldout_prompts(tokenizer=own.tokenizer, **b.prompt_set)
    ids = [p["prompt_ids"] for p in prompts]
    ways = {"plain": PlainSampler(own.target, own.tokenizer)}
    if not isinstance(own, PlainSampler):
        ways[f"{type(own).__module__.rpartition('.')[2]}, {b.verify}"] = own
    cases = [(t, name, waits) for t in b.temperatures for name in ways for waits in (True, False)]
    found: dict[tuple, list[tuple[float, list[Result]]]] = {case: [] for case in cases}
    with results(results_folder(b, "batching")) as out:
        for t, name, waits in track(cases * b.repeats, "batching"):
            found[t, name, waits].append(measure(b, ways[name], ids, t, waits))
        lines = [line(found, t, name) for t in b.temperatures for name in ways]
        asked = f"{b.shortest} to {b.max_new_tokens} new tokens"
        title = f"{b.prompts} prompts of {b.source}, {asked}, {b.at_once} at once, {b.dtype}"
        write_table(lines, out / "batching.csv", title, "decoding.bench.batching")


def measure(
    b: Batching, sampler: Sampler, prompts: list[list[int]], temperature: float, waits: bool
) -> tuple[float, list[Result]]:
    """Seconds and results of all prompts."""
    shared = {"temperature": temperature, "ignore_eos": b.ignore_eos, "verify": b.verify}
    params = [SamplingParams(max_new_tokens=n, **shared) for n in lengths(b)]
    seeds = [b.seed + i for i in range(len(prompts))]
    started = perf_counter()
    if not waits:
        found = sampler.generate(prompts, params, seeds=seeds, at_once=b.at_once)
        return perf_counter() - started, found
    found = []
    for start in range(0, len(prompts), b.at_once):
        some = slice(start, start + b.at_once)
        found += sampler.generate(prompts[some], params[some], seeds=seeds[some])
    return perf_counter() - started, found


def lengths(b: Batching) -> list[int]:
    """max_new_tokens of each request."""
    step = (b.max_new_tokens - b.shortest) / max(1, b.prompts - 1)
    spread = [round(b.shortest + i * step) for i in range(b.prompts)]
    random.Random(b.seed).shuffle(spread)
    return spread


def line(found: dict, temperature: float, name: str) -> dict:
    """A line of the table, by column."""
    runs = [found[temperature, name, waits] for waits in (True, False)]
    (waited, before), (joined, after) = (min(of, key=itemgetter(0)) for of in runs)
    tokens = sum(len(r.token_ids) for r in after)
    same = sum(a.token_ids == b.token_ids for a, b in zip(before, after))
    return {
        "sampler": name,
        "T": temperature,
        "batches that wait, s": round(waited, 1),
        "without waiting, s": round(joined, 1),
        "times": round(waited / joined, 2),
        "tokens/s": round(tokens / joined, 1),
        "same text": f"{same}/{len(after)}",
    }


if __name__ == "__main__":
    main(run)
