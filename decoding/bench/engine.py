"""`python -m decoding.bench.engine model=runs/deer_stage2/export`: a drafter in a serving engine.

The engine must accept as many drafted tokens at each position as our sampler. This finds a shift
by one in positions, a wrong norm or a wrong mask. Ours drafts chains as engines do.
"""

import time
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

from data.arguments import BlockSize, Count, Temperature, Whole
from decoding.bench.options import note_model, results_folder
from decoding.engine.params import Result, Stats, accepted_counts
from decoding.report import counted, results, write_table
from recipes.command import main
from recipes.options import PromptOptions, check_first, option, parse


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
    suffix: bool = option(
        False, "its suffix decoding (the package arctic-inference) and our n-grams too"
    )
    temperature: Temperature = option(0.0, "of the sampling; 0 is greedy")


def read_options(argv: list[str]) -> EngineBench:
    """Return the command's options."""
    return parse(argv, EngineBench, "decoding.bench.engine")


check_first(__name__, read_options)

import torch

from decoding.bench.rows import ERROR, Row, on_screen, params_of, questions, ratio_error, take_turns
from decoding.external.reply import Reply
from decoding.external.vllm_engine import ON_CPU, Vllm, interpreter, speculative_config
from decoding.fetch import fetch
from decoding.loading import load, parade_config, target_of
from decoding.samplers.ngram import NgramSampler
from decoding.samplers.plain import PlainSampler

SUFFIX = 24  # tokens that vLLM's suffix decoding drafts at most
AWAKE = 1.2  # seconds: after an answer vLLM's processes wait for the next one on a core, for 1 s
SHOWN = 8  # positions that a screen has room for


@dataclass
class Way(Row):
    """One way to decode, measured batch by batch.

    Attributes:
        drafts: Of each batch (of our sampler, each prompt), how many drafts were verified; empty
            for plain decoding.
        passes: Of each batch, how many passes of the target those were, and the ones that had
            nothing to verify, as where a lookup finds nothing.
        accepted: How many of these drafts had at least i + 1 tokens accepted, for each position i.
    """

    drafts: list[int] = field(default_factory=list)
    passes: list[int] = field(default_factory=list)
    accepted: list[list[int]] = field(default_factory=list)

    @property
    def turn(self) -> int:
        return self.batch

    def add(self, drafts: int, accepted: list[int], undrafted: int = 0) -> None:
        """Add counts of drafts, and of passes without one."""
        self.drafts.append(drafts)
        self.passes.append(drafts + undrafted)
        self.accepted.append(accepted)

    def at(self, position: int) -> tuple[float, float]:
        """Return the share of drafts accepted at a position, from 0, and its standard error."""
        return _ratio([counts[position] for counts in self.accepted], self.drafts)

    def line(self, positions: int) -> dict:
        """The way's line of the table, with the acceptance at so many positions."""
        emitted = [n + sum(counts) for n, counts in zip(self.passes, self.accepted)]
        length, error = _ratio(emitted, self.passes) if self.drafts else (1.0, 0.0)
        found = {
            "engine": self.name,
            **self.speedup,
            "acceptance length": round(length, 2),
            f"acceptance length{ERROR}": error if self.plain else "",
        }
        for i in range(positions):
            at = self.at(i) if self.drafts and i < len(self.accepted[0]) else ("", "")
            found |= dict(zip((f"at {i + 1}", f"at {i + 1}{ERROR}"), at))
        return found | {"identical to its plain": self.same}


class Ours(Way):
    """Our sampler."""

    def decode(self, prompts: list, seeds: list[int] | None = None) -> list[Result]:
        assert seeds is not None
        results = super().decode(prompts, seeds)
        # An engine's prefill gives the first token without a draft.
        drafted = [i for i, r in enumerate(results) if r.stats.drafted and len(r.token_ids) > 1]
        if drafted:
            rest = replace(self.params, max_new_tokens=self.params.most - 1)
            begun = [prompts[i] + results[i].token_ids[:1] for i in drafted]
            for result in self.sampler.generate(begun, rest, seeds=[seeds[i] for i in drafted]):
                self.add(*accepted_counts(result.stats.passes, self.params.block_size or 0))
        return results


class OurNgrams(Way):
    """Our sampler without a drafter, which would learn from a prompt that it decoded twice."""

    sampler: NgramSampler

    def decode(self, prompts: list, seeds: list[int] | None = None) -> list[Result]:
        results = super().decode(prompts, seeds)
        for result in results:
            most = max(self.sampler.tree.nodes.values())
            self.add(*accepted_counts(result.stats.passes, most))
        return results


@dataclass
class Theirs(Way):
    """A serving engine, with the end tokens of our sampler."""

    engine: Vllm = field(kw_only=True)
    eos: list[int] = field(kw_only=True)

    def decode(self, prompts: list, seeds: list[int] | None = None) -> list[Result]:
        reply = self._reply(prompts, seeds)
        results = [Result("", answer or [], "", Stats()) for answer in reply.token_ids]
        self.results += results
        self.seconds.append(reply.seconds)
        if "accepted_tokens_per_pos" in reply.drafts:
            drafts, accepted = reply.drafts["drafts"], reply.drafts["accepted_tokens_per_pos"]
            decoded = sum(max(len(result.token_ids) - 1, 0) for result in results)
            self.add(drafts, accepted, max(decoded - drafts - sum(accepted), 0))
        return results

    def warm_up(self, prompts: list[list[int]]) -> None:
        self._reply(prompts[: self.batch])

    def _reply(self, prompts: list, seeds: list[int] | None = None) -> Reply:
        reply = self.engine.generate(prompts, self.params, eos=self.eos, seeds=seeds)
        time.sleep(AWAKE)  # else it takes that core from the way whose turn comes next
        return reply


def _ratio(above: list[int], below: list[int]) -> tuple[float, float]:
    """Return sum(above) / sum(below) over prompts, and its standard error."""
    return round(sum(above) / sum(below), 3), float(ratio_error(above, below) or 0)


def run(argv: list[str]) -> None:
    """Run the command with its arguments `key=value`."""
    bench = read_options(argv)
    with results(results_folder(bench, "bench_vllm")) as out:
        note_model(bench, out)
        report(bench, measure(bench), out)


def report(bench: EngineBench, ways: list[Way], out: Path) -> None:
    """Print the table, and write engine.csv and the command."""
    positions = max((len(way.accepted[0]) for way in ways if way.drafts), default=0)
    lines = [way.line(positions) for way in ways]
    title = f"{counted(len(ways[0].results), 'prompt')} of {Path(bench.source).name}, {bench.dtype}"
    title += f", batch {bench.batch_size}"
    command = "decoding.bench.engine"
    shown = [on_screen(way.line(min(positions, SHOWN))) for way in ways]
    write_table(lines, out / "engine.csv", title, command, shown)
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
    """Decode every prompt in every way, all ways in turn; an ordinary model has no drafter.

    Raises:
        ValueError: The export is no drafter that the engine runs, or the engine does not start.
    """
    python = interpreter(bench.python)  # its lack must not cost minutes
    model = fetch(bench.model)
    config = parade_config(str(model))
    named = target_of(str(model), config, bench.target)
    if named is None and config["method"] != "plain":
        raise ValueError(f"{bench.model} is no drafter (it names no target), and no ordinary model")
    speculative = speculative_config(model, bench.block_size) if named else {}
    target = fetch(named) if named else model
    if bench.threads is not None:
        torch.set_num_threads(bench.threads)
    sampler = load(str(model), target=bench.target, **bench.placing)
    ids = questions(bench, sampler.tokenizer)
    width = speculative.get("num_speculative_tokens")
    params = params_of(bench, temperature=bench.temperature, block_size=width)

    given: dict = {"params": params, "batch": bench.batch_size}
    plain = Ours("ours, plain", PlainSampler(sampler.target, sampler.tokenizer), **given)
    ours: list[Way] = [plain]
    if named:
        ours.append(Ours("ours", sampler, plain=plain, **given))
    if bench.suffix:  # both draft from earlier answers
        ngrams = NgramSampler(sampler.target, sampler.tokenizer)
        ours.append(OurNgrams("ours, ngram", ngrams, plain=plain, **given))
    engines: dict[str, dict] = {"vllm, plain": {}}
    if bench.ngram:
        lookup = {"method": "ngram", "num_speculative_tokens": bench.ngram, "prompt_lookup_max": 4}
        engines["vllm, ngram"] = {"speculative_config": lookup}
    if bench.suffix:
        engines["vllm, suffix"] = {"speculative_config": {"method": "suffix"}}
    if named:
        engines["vllm"] = {"speculative_config": speculative}
    # Room for drafts that reach beyond the answer.
    drafted = max(bench.ngram, SUFFIX * bench.suffix, width or 0)
    context = max(map(len, ids)) + bench.max_new_tokens + 2 * drafted
    options = {
        "dtype": bench.dtype,
        "max_model_len": context,
        "max_num_seqs": bench.batch_size,
        "seed": bench.seed,
        "enable_prefix_caching": False,
        **(ON_CPU if bench.device == "cpu" else {}),
    }
    with ExitStack() as stack:
        theirs, eos = list[Theirs](), sorted(sampler.eos)
        for name, how in engines.items():
            engine = Vllm(str(target), python, bench.threads, **options, **how)
            given |= {"engine": stack.enter_context(engine), "eos": eos}
            theirs.append(Theirs(name, plain=theirs[0] if theirs else None, **given))
        take_turns([*ours, *theirs], ids, bench.seed, "engine bench")
    return [*ours, *theirs]


if __name__ == "__main__":
    main(run)
