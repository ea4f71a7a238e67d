"""Rows of benches, which decode in turn on one clock, and comparisons and standard errors."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import sqrt
from statistics import fmean, median, stdev
from time import perf_counter
from typing import Any, Self

import numpy
from scipy.stats import bootstrap
from transformers import PreTrainedTokenizerBase

from data.text.prompts import heldout_prompts
from decoding.engine.params import Result, SamplingParams, Stats
from decoding.engine.sampler import Sampler
from recipes.options import PromptOptions
from terminal.progress import track

REFILLED = 4  # prompts for each place of a batch, in the time between two readings of the clock
ERROR = " ±"  # ends the name of a column of standard errors


@dataclass
class Row:
    """One way to decode, measured over all prompts.

    Attributes:
        sampler: A `Sampler`, or anything that generates like one.
        batch: Prompts that are decoded together.
        plain: Plain decoding of the same weights with the same parameters and batch size; None
            for plain decoding itself.
        results: One for each prompt.
        seconds: One for each turn.
    """

    name: str
    sampler: Any = None
    params: SamplingParams = field(default_factory=SamplingParams)
    batch: int = 1
    plain: Self | None = None
    results: list[Result] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def decode(self, prompts: list, seeds: list[int] | None = None) -> list[Result]:
        """Decode the prompts of a turn, and keep their results and seconds."""
        started = perf_counter()
        results = self.sampler.generate(prompts, self.params, seeds=seeds, at_once=self.batch)
        self.seconds.append(perf_counter() - started)
        self.results += results
        return results

    def warm_up(self, prompts: list) -> None:
        """Decode a batch that is not measured: allocations, first calls of kernels."""
        first, sampler = prompts[: self.batch], self.sampler
        if isinstance(sampler, Sampler):
            sampler = sampler.fresh()  # the prompts may be measured too
        sampler.generate(first, self.params, seeds=[*range(len(first))])

    @property
    def turn(self) -> int:
        """Return how many prompts are timed together: one, or several for each slot of a batch."""
        return self.batch if self.batch == 1 else REFILLED * self.batch

    @property
    def stats(self) -> list[Stats]:
        """Return the statistics of each prompt."""
        return [r.stats for r in self.results]

    @property
    def lengths(self) -> list[int]:
        """Return the tokens of each answer."""
        return [len(r.token_ids) for r in self.results]

    @property
    def rate(self) -> float:
        """Return the tokens/s over all turns."""
        return sum(self.lengths) / sum(self.seconds)

    @property
    def rates(self) -> list[float]:
        """Return the tokens/s of each turn."""
        lengths, starts = self.lengths, range(0, len(self.results), self.turn)
        tokens = (sum(lengths[start : start + self.turn]) for start in starts)
        return [n / s for n, s in zip(tokens, self.seconds)]

    @property
    def speedups(self) -> list[float]:
        """Return the tokens/s of each turn over those of plain decoding; lengths may differ."""
        return [a / b for a, b in zip(self.rates, (self.plain or self).rates)]

    @property
    def speedup(self) -> dict:
        """Return columns of a table: tokens/s, and the speed-up with its standard error."""
        return {
            "tokens/s": round(self.rate, 1),
            "speed-up": round(median(self.speedups), 2),
            f"speed-up{ERROR}": median_error(self.speedups) if self.plain else "",
        }

    @property
    def emitted(self) -> list[int]:
        """Return the tokens of every target pass of every prompt."""
        return [n for s in self.stats for n in s.emitted]

    @property
    def same(self) -> str:
        """Return how many of the answers are plain decoding's, as 'n/all'."""
        pairs = zip(self.results, (self.plain or self).results)
        return f"{sum(a.token_ids == b.token_ids for a, b in pairs)}/{len(self.results)}"


def take_turns(
    rows: Sequence[Row],
    prompts: list[list[int]],
    seed: int,
    name: str,
    first: list[list[int]] | None = None,
) -> None:
    """Decode every prompt with every row after a warm-up, all rows in turn.

    Rows are interleaved so that a slow minute of the machine affects all of them. Prompt i has the
    seed `seed` + i in every row. The warm-up is with the prompts `first`; None: with `prompts`.
    """
    for row in rows:
        row.warm_up(first or prompts)
    steps = [(start, row) for row in rows for start in range(0, len(prompts), row.turn)]
    for start, row in track(sorted(steps, key=lambda step: step[0]), name):
        turn = prompts[start : start + row.turn]
        row.decode(turn, [seed + start + i for i in range(len(turn))])


def questions(options: PromptOptions, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Return the token ids of the prompts that a bench's options name."""
    found = heldout_prompts(tokenizer=tokenizer, **options.prompt_set)
    return [prompt["prompt_ids"] for prompt in found]


def params_of(options: PromptOptions, **more) -> SamplingParams:
    """Return the parameters of a bench's requests."""
    shared = {name: getattr(options, name) for name in ("max_new_tokens", "ignore_eos")}
    return SamplingParams(**shared, **more)


def cycle(stats: list[Stats]) -> dict[str, float]:
    """Return the milliseconds per cycle (one target pass) in target, drafter and everything else.

    A cycle of several requests counts once for each of them.
    """
    parts = {"target": "target_s", "drafter": "drafter_s", "rest": "sampler_s"}
    passes = sum(s.target_passes for s in stats)
    spent = {name: sum(getattr(s, key) for s in stats) for name, key in parts.items()}
    return {name: round(1000 * seconds / passes, 3) for name, seconds in spent.items()}


def mean_error(values: Sequence[float]) -> float:
    """Return the standard error of a mean; 0 for one value."""
    return stdev(values) / sqrt(len(values)) if len(values) > 1 else 0.0


def spread(values: Sequence[float]) -> str:
    """Return the mean and its standard error, as text."""
    return f"{fmean(values):.2f} ± {mean_error(values):.2f}"


def share_of(right: list[bool]) -> tuple[float, float]:
    """Return the share of correct answers, and its standard error for independent problems."""
    share = sum(right) / len(right)
    return round(share, 4), round(sqrt(share * (1 - share) / len(right)), 4)


def median_error(values: list[float]) -> float | str:
    """Return the standard error of a median over prompts; '' for one value."""
    return _bootstrap_error(numpy.median, values)


def ratio_error(above: Sequence[float], below: Sequence[float]) -> float | str:
    """Return the standard error of sum(above) / sum(below) over prompts; '' for one pair."""
    return _bootstrap_error(lambda a, b, axis: a.sum(axis) / b.sum(axis), above, below)


def _bootstrap_error(statistic: Callable, *samples: Sequence[float]) -> float | str:
    """Return the standard error of a statistic by the bootstrap (Efron 1979); '' for one prompt."""
    if len(samples[0]) < 2:
        return ""
    settings = {"n_resamples": 2000, "method": "basic", "random_state": 0}
    return round(float(bootstrap(samples, statistic, paired=True, **settings).standard_error), 3)


def on_screen(line: dict) -> dict:
    """Return a table's line with each figure and its standard error in one cell."""
    found = {}
    for key, value in line.items():
        if key != "dtype" and not key.endswith(ERROR):  # the title says it
            error = line.get(f"{key}{ERROR}", "")
            found[key] = value if error == "" else f"{value:.2f} ± {error:.2f}"
    return {"T" if key == "temperature" else key: value for key, value in found.items()}
