"""`python -m decoding.bench.engine model=runs/deer_stage2/export`: a drafter in a serving engine.

The same prompts are decoded by our sampler and by vLLM, plainly and with the export's drafter, in
turn, each engine with its own caches and kernels. An ordinary model is decoded plainly. An engine
that we did not write must accept as many drafted tokens at each position as our sampler does: a
shift by one in positions, a wrong norm or mask shows here and nowhere else. Ours drafts chains
(`verify=coupled`), which is what such engines run.
"""

from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import ClassVar

import torch

from data.text.prompts import heldout_prompts
from decoding.bench.options import results_folder
from decoding.bench.text_report import ERROR, median_error, on_screen, ratio_error
from decoding.commands.cli import main, parse, quiet
from decoding.commands.options import PromptOptions, option
from decoding.commands.progress import track
from decoding.commands.report import results, write_table
from decoding.engine.params import SamplingParams, accepted_counts
from decoding.engine.sampler import Sampler
from decoding.external.vllm_engine import ON_CPU, Vllm, interpreter, speculative_config
from decoding.fetch import fetch
from decoding.loading import load, parade_config, target_of
from decoding.samplers.plain import PlainSampler

ENGINES = ("vllm",)


@dataclass(frozen=True, kw_only=True)
class EngineBench(PromptOptions):
    """Compare a drafter in a serving engine with the same drafter in our sampler."""

    EXAMPLE: ClassVar[str] = "model=runs/deer_stage2/export source=humaneval prompts=64"

    target: str | None = option(None, "a target instead of the one that the export names")
    engine: str = option("vllm", "that serves the drafter", choices=ENGINES)
    python: str | None = option(None, "the interpreter that has it; null: that of make vllm")
    threads: int | None = option(1, "of either engine on a CPU; null: all", least=1)
    batch_size: int = option(1, "prompts that are decoded together", least=1)
    block_size: int | None = option(None, "tokens drafted a cycle; null: the export's own", least=1)
    ngram: int = option(8, "tokens that vLLM's prompt lookup drafts; 0: leave it out", least=0)
    temperature: float = option(0.0, "of the sampling; 0 is greedy", least=0)


@dataclass
class Way:
    """One way to decode, measured batch by batch.

    Attributes:
        name: In the table.
        plain: The same engine's plain decoding; None where it is that itself.
        answers: Token ids of each prompt's answer.
        tokens: Of the answers of each batch, together.
        seconds: Of each batch.
        drafts: Of each batch (of our sampler, each prompt), how many drafts were verified; empty
            for plain decoding.
        accepted: How many of these drafts had at least i + 1 tokens accepted, for each position i.
    """

    name: str
    plain: "Way | None" = None
    answers: list[list[int]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)
    accepted: list[list[int]] = field(default_factory=list)

    @property
    def rates(self) -> list[float]:
        """Tokens/s of each batch."""
        return [tokens / s for tokens, s in zip(self.tokens, self.seconds)]

    def decoded(self, answers: list[list[int]], seconds: float) -> None:
        """Add a batch's answers."""
        self.answers += answers
        self.tokens.append(sum(map(len, answers)))
        self.seconds.append(seconds)

    def add(self, drafts: int, accepted: list[int]) -> None:
        """Add counts of drafts."""
        self.drafts.append(drafts)
        self.accepted.append(accepted)

    def at(self, position: int) -> tuple[float, float]:
        """The share of drafts accepted beyond a position, 0-based, and its standard error."""
        return _ratio([counts[position] for counts in self.accepted], self.drafts)

    def line(self, positions: int) -> dict:
        """The way's line of the table, with the acceptance at so many positions."""
        plain = self.plain or self
        speedups = [a / b for a, b in zip(self.rates, plain.rates)]
        emitted = [n + sum(counts) for n, counts in zip(self.drafts, self.accepted)]
        length, error = _ratio(emitted, self.drafts) if self.drafts else (1.0, 0.0)
        found = {
            "engine": self.name,
            "tokens/s": round(sum(self.tokens) / sum(self.seconds), 1),
            "speed-up": round(median(speedups), 2),
            f"speed-up{ERROR}": median_error(speedups) if self.plain else "",
            "acceptance length": round(length, 2),
            f"acceptance length{ERROR}": error if self.plain else "",
        }
        for i in range(positions):
            share, error = self.at(i) if self.drafts and i < len(self.accepted[0]) else ("", "")
            found |= {f"at {i + 1}": share, f"at {i + 1}{ERROR}": error}
        same = sum(a == b for a, b in zip(self.answers, plain.answers))
        return found | {"identical to its plain": f"{same}/{len(self.answers)}"}


def _ratio(above: list[int], below: list[int]) -> tuple[float, float]:
    """sum(above) / sum(below) over prompts, and its standard error."""
    return round(sum(above) / sum(below), 3), float(ratio_error(above, below) or 0)


def run(argv: list[str]) -> None:
    """Run the command with its arguments `key=value`."""
    quiet()
    bench = parse(argv, EngineBench, "decoding.bench.engine")
    with results(results_folder(bench, f"bench_{bench.engine}")) as out:
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
        print(agreement(drafting["ours"], drafting[bench.engine]))


def agreement(ours: Way, theirs: Way) -> str:
    """Whether two engines accept as many tokens at each position: one line.

    Within two standard errors of the difference they do; the errors are taken as independent.
    """
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

    Args:
        bench: The command's options.

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
    prompts = heldout_prompts(tokenizer=sampler.tokenizer, **bench.prompt_set)
    ids = [p["prompt_ids"] for p in prompts]
    width = speculative["num_speculative_tokens"] if speculative else None
    params = SamplingParams(
        max_new_tokens=bench.max_new_tokens,
        temperature=bench.temperature,
        ignore_eos=bench.ignore_eos,
        block_size=width,
    )
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
    plain = Way("ours, plain")
    ours = [(plain, PlainSampler(sampler.target, sampler.tokenizer))]
    ours += [(Way("ours", plain), sampler)] if named else []
    base = Way(f"{bench.engine}, plain")
    theirs = [(base, None)]
    if bench.ngram:
        lookup = {"method": "ngram", "num_speculative_tokens": bench.ngram, "prompt_lookup_max": 4}
        theirs.append((Way(f"{bench.engine}, ngram", base), lookup))
    theirs += [(Way(bench.engine, base), speculative)] if named else []
    with ExitStack() as stack:
        engines = []
        for way, how in theirs:
            more = {} if how is None else {"speculative_config": how}
            engine = Vllm(str(target), python, bench.threads, **options, **more)
            engines.append((way, stack.enter_context(engine)))
        eos = sorted(sampler.eos)
        seeds = [bench.seed + i for i in range(len(ids))]
        batches = [slice(i, i + bench.batch_size) for i in range(0, len(ids), bench.batch_size)]

        def decode(batch: slice, warm_up: bool = False) -> None:
            given = ids[batch], seeds[batch], params
            for way, engine in ours:
                _ours(Way("") if warm_up else way, engine, *given)
            for way, engine in engines:
                measure_engine(Way("") if warm_up else way, engine, *given, eos)

        decode(batches[0], warm_up=True)
        for batch in track(batches, "bench"):
            decode(batch)
    return [way for way, _ in (*ours, *theirs)]


def _ours(way: Way, sampler: Sampler, ids: list, seeds: list[int], params: SamplingParams) -> None:
    """Measure one of our samplers on a batch."""
    started = perf_counter()
    results = sampler.generate(ids, params, seeds=seeds)
    way.decoded([result.token_ids for result in results], perf_counter() - started)
    # An engine's prefill gives the first token without a draft: so counted, passes are the same.
    drafted = [i for i, r in enumerate(results) if r.stats.drafted and len(r.token_ids) > 1]
    if not drafted:
        return
    rest = replace(params, max_new_tokens=params.max_new_tokens - 1)
    prompts = [ids[i] + results[i].token_ids[:1] for i in drafted]
    for result in sampler.generate(prompts, rest, seeds=[seeds[i] for i in drafted]):
        way.add(*accepted_counts(result.stats.passes, params.block_size))


def measure_engine(
    way: Way, engine: Vllm, ids: list, seeds: list[int], params: SamplingParams, eos: list[int]
) -> None:
    """Measure a serving engine on a batch.

    Args:
        way: Gets the answers, the seconds and, where the engine drafts, the acceptance.
        engine: The engine.
        ids: Token ids of each prompt.
        seeds: One a prompt.
        params: How to sample.
        eos: The target's end-of-text tokens.
    """
    reply = engine.generate(ids, params, eos=eos, seeds=seeds)
    way.decoded(reply.token_ids, reply.seconds)
    if "accepted_tokens_per_pos" in reply.drafts:
        way.add(reply.drafts["drafts"], reply.drafts["accepted_tokens_per_pos"])


if __name__ == "__main__":
    main(run)
