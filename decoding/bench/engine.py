"""`python -m decoding.bench.engine model=runs/deer_stage2/export`: a drafter in a serving engine.

Our sampler and vLLM decode the same prompts in turn, plainly and with the export's drafter, each
with its own caches and kernels. An ordinary model is only decoded plainly. The engine must accept
as many drafted tokens at each position as our sampler: this is the test that finds a shift by one
in positions, a wrong norm or a wrong mask. Ours drafts chains (`verify=coupled`), as such engines
do.
"""

from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import ClassVar

import torch

from data.arguments import BlockSize, Count, Temperature, Whole
from decoding.bench.options import results_folder
from decoding.bench.rows import (
    ERROR,
    Row,
    median_error,
    on_screen,
    params_of,
    questions,
    ratio_error,
)
from decoding.engine.params import Result, SamplingParams, Stats, accepted_counts
from decoding.engine.sampler import Sampler
from decoding.external.vllm_engine import ON_CPU, Vllm, interpreter, speculative_config
from decoding.fetch import fetch
from decoding.loading import load, parade_config, target_of
from decoding.report import results, track, write_table
from decoding.samplers.plain import PlainSampler
from recipes.command import main
from recipes.options import PromptOptions, option, parse


@dataclass(frozen=True, kw_only=True)
class EngineBench(PromptOptions):
    """Compare a drafter in a serving engine with the same drafter in our sampler."""

    EXAMPLE: ClassVar[str] = "model=runs/deer_stage2/export source=humaneval prompts=64"

    target: str | None = option(None, "a target instead of the one that the export names")
    python: str | None = option(None, "that has the engine; null: .venv-vllm's, or this one")
    threads: Count | None = option(1, "of either engine on a CPU; null: all")
    batch_size: Count = option(1, "prompts that are decoded together")
    block_size: BlockSize | None = option(None, "tokens drafted a cycle; null: the export's own")
    ngram: Whole = option(8, "tokens that vLLM's prompt lookup drafts; 0: leave it out")
    temperature: Temperature = option(0.0, "of the sampling; 0 is greedy")


@dataclass
class Way(Row):
    """One way to decode, measured batch by batch.

    Attributes:
        drafts: Of each batch (of our sampler, each prompt), how many drafts were verified; empty
            for plain decoding.
        accepted: How many of these drafts had at least i + 1 tokens accepted, for each position i.
    """

    drafts: list[int] = field(default_factory=list)
    accepted: list[list[int]] = field(default_factory=list)

    @property
    def turn(self) -> int:
        """Prompts that are timed together: a batch."""
        return self.batch

    def add(self, drafts: int, accepted: list[int]) -> None:
        """Add counts of drafts."""
        self.drafts.append(drafts)
        self.accepted.append(accepted)

    def at(self, position: int) -> tuple[float, float]:
        """Return the share of drafts accepted at a position, from 0, and its standard error."""
        return _ratio([counts[position] for counts in self.accepted], self.drafts)

    def line(self, positions: int) -> dict:
        """The way's line of the table, with the acceptance at so many positions."""
        emitted = [n + sum(counts) for n, counts in zip(self.drafts, self.accepted)]
        length, error = _ratio(emitted, self.drafts) if self.drafts else (1.0, 0.0)
        found = {
            "engine": self.name,
            "tokens/s": round(self.rate, 1),
            "speed-up": round(median(self.speedups), 2),
            f"speed-up{ERROR}": median_error(self.speedups) if self.plain else "",
            "acceptance length": round(length, 2),
            f"acceptance length{ERROR}": error if self.plain else "",
        }
        for i in range(positions):
            share, error = self.at(i) if self.drafts and i < len(self.accepted[0]) else ("", "")
            found |= {f"at {i + 1}": share, f"at {i + 1}{ERROR}": error}
        return found | {"identical to its plain": self.same}


def _ratio(above: list[int], below: list[int]) -> tuple[float, float]:
    """Return sum(above) / sum(below) over prompts, and its standard error."""
    return round(sum(above) / sum(below), 3), float(ratio_error(above, below) or 0)


def run(argv: list[str]) -> None:
    """Run the command with its arguments `key=value`."""
    bench = parse(argv, EngineBench, "decoding.bench.engine")
    with results(results_folder(bench, "bench_vllm")) as out:
        report(bench, measure(bench), out)


def report(bench: EngineBench, ways: list[Way], out: Path) -> None:
    """Print the table, and write engine.csv and the command."""
    positions = max((len(way.accepted[0]) for way in ways if way.drafts), default=0)
    lines = [way.line(positions) for way in ways]
    title = f"{bench.prompts} prompts of {Path(bench.source).name}, {bench.dtype}"
    if bench.batch_size > 1:
        title += f", {bench.batch_size} together"
    command = "decoding.bench.engine"
    write_table(lines, out / "engine.csv", title, command, [*map(on_screen, lines)])
    print("at i: share of drafts with at least i tokens accepted; ±: standard error over prompts")
    drafting = {way.name: way for way in ways}
    if "ours" in drafting:
        print(agreement(drafting["ours"], drafting["vllm"]))


def agreement(ours: Way, theirs: Way) -> str:
    """Say if two engines accept equally at each position, within two standard errors."""
    apart = []
    for i, _ in enumerate(theirs.accepted[0]):
        (a, a_error), (b, b_error) = ours.at(i), theirs.at(i)
        if abs(a - b) > 2 * (a_error**2 + b_error**2) ** 0.5:
            apart.append(f"{i + 1} (ours {a:.3f}, {theirs.name} {b:.3f})")
    if apart:
        return f"acceptance differs by more than two standard errors at position {', '.join(apart)}"
    return f"acceptance at each position: ours and {theirs.name} within two standard errors"


def measure(bench: EngineBench) -> list[Way]:
    """Decode every prompt in every way, all ways in turn.

    Returns:
        The ways: 'ours, plain' and 'ours', and of the engine plain decoding, its prompt lookup
        where it is asked for, and the drafter. An ordinary model has no drafter.

    Raises:
        ValueError: The export is no drafter that the engine runs, or the engine does not start.
    """
    python = interpreter(bench.python)  # its lack must not cost minutes
    model = fetch(bench.model)
    config = parade_config(str(model))
    named = target_of(str(model), config, bench.target)
    if named is None and config["method"] != "plain":
        raise ValueError(f"{bench.model} is no drafter (it names no target), and no ordinary model")
    speculative = speculative_config(model, bench.block_size) if named else None
    target = fetch(named) if named else model
    if bench.threads is not None:
        torch.set_num_threads(bench.threads)
    sampler = load(str(model), target=bench.target, **bench.placing)
    ids = questions(bench, sampler.tokenizer)
    width = speculative["num_speculative_tokens"] if speculative else None
    params = params_of(bench, temperature=bench.temperature, block_size=width)

    def way(name: str, plain: Way | None = None, by: Sampler | None = None) -> Way:
        return Way(name, by, params, bench.batch_size, plain)

    plain = way("ours, plain", by=PlainSampler(sampler.target, sampler.tokenizer))
    ours = [plain, way("ours", plain, sampler)] if named else [plain]
    base = way("vllm, plain")
    theirs = [(base, None)]
    if bench.ngram:
        lookup = {"method": "ngram", "num_speculative_tokens": bench.ngram, "prompt_lookup_max": 4}
        theirs.append((way("vllm, ngram", base), lookup))
    theirs += [(way("vllm", base), speculative)] if named else []
    # Room for drafts that reach beyond the answer.
    context = max(map(len, ids)) + bench.max_new_tokens + 2 * max(bench.ngram, width or 0)
    options = {
        "dtype": bench.dtype,
        "max_model_len": context,
        "max_num_seqs": bench.batch_size,
        "seed": bench.seed,
        "enable_prefix_caching": False,
        **(ON_CPU if bench.device == "cpu" else {}),
    }
    with ExitStack() as stack:
        engines = []
        for each, how in theirs:
            more = {} if how is None else {"speculative_config": how}
            engine = Vllm(str(target), python, bench.threads, **options, **more)
            engines.append((each, stack.enter_context(engine)))
        decode_in_turn(ours, engines, ids, bench.seed, sorted(sampler.eos))
    return [*ours, *(each for each, _ in theirs)]


def decode_in_turn(
    ours: list[Way], engines: list[tuple[Way, Vllm]], ids: list, seed: int, eos: list[int]
) -> None:
    """Decode all prompts in batches, every way in turn, after a warm-up with the first batch."""
    size = ours[0].batch

    def decode(start: int, warm_up: bool = False) -> None:
        some = slice(start, start + size)
        batch, seeds = ids[some], [seed + i for i in range(len(ids))][some]
        for way in ours:
            empty = {"results": [], "seconds": [], "drafts": [], "accepted": []}
            _ours(replace(way, **empty) if warm_up else way, batch, seeds)
        for way, engine in engines:
            kept = Way("") if warm_up else way
            measure_engine(kept, engine, batch, seeds, ours[0].params, eos)

    decode(0, warm_up=True)
    for start in track(range(0, len(ids), size), "bench"):
        decode(start)


def _ours(way: Way, ids: list, seeds: list[int]) -> None:
    """Measure one of our samplers on a batch."""
    results, params = way.decode(ids, seeds), way.params
    # An engine's prefill gives the first token without a draft: so counted, passes are the same.
    drafted = [i for i, r in enumerate(results) if r.stats.drafted and len(r.token_ids) > 1]
    if not drafted:
        return
    rest = replace(params, max_new_tokens=params.max_new_tokens - 1)
    prompts = [ids[i] + results[i].token_ids[:1] for i in drafted]
    for result in way.sampler.generate(prompts, rest, seeds=[seeds[i] for i in drafted]):
        way.add(*accepted_counts(result.stats.passes, params.block_size))


def measure_engine(
    way: Way, engine: Vllm, ids: list, seeds: list[int], params: SamplingParams, eos: list[int]
) -> None:
    """Measure a serving engine on a batch: answers, seconds and, if it drafts, acceptance."""
    reply = engine.generate(ids, params, eos=eos, seeds=seeds)
    way.results += [Result("", answer, "", Stats()) for answer in reply.token_ids]
    way.seconds.append(reply.seconds)
    if "accepted_tokens_per_pos" in reply.drafts:
        way.add(reply.drafts["drafts"], reply.drafts["accepted_tokens_per_pos"])


if __name__ == "__main__":
    main(run)
