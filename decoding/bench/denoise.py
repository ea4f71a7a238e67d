"""`python -m decoding.bench.denoise model=runs/spiffy_calibrate/export`: passes saved by drafts.

Every held-out prompt is decoded by vanilla denoising and by each draft graph in turn, one prompt at
a time, after a warm-up. NFE are network passes; the speed-up in NFE is computed over all tokens
and, as published, over the blocks up to the first end token. `caches=[prefix,dual]` measures what
these approximate caches cost, the share of positions with another token, and beside each of them
the same cache as a drafter that is verified, which costs nothing.
"""

import itertools
from collections import Counter
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from statistics import fmean, median
from time import perf_counter
from typing import ClassVar

from data.text.prompts import heldout_prompts
from decoding.bench.options import PromptBenchOptions, results_folder, told_apart
from decoding.commands.cli import main, parse, quiet
from decoding.commands.options import option
from decoding.commands.progress import track
from decoding.commands.report import picture, results, write_table
from decoding.engine.batch import Batch
from decoding.engine.params import Result, SamplingParams
from decoding.loading import load, parade_config, sampler_of, sampling_config
from decoding.masked.draft_graph import DraftGraph, show
from decoding.samplers import denoise, spiffy
from decoding.samplers.denoise import DenoiseSampler
from decoding.samplers.spiffy import SpiffySampler

# And the methods of a sampler whose seconds they are; ranking is part of verifying.
STAGES = {"drafts": ("drafts",), "verify": ("verify", "begin_next"), "rank": ("rank",)}


@dataclass(frozen=True, kw_only=True)
class DenoiseBench(PromptBenchOptions):
    """Compare an export's draft graph with vanilla denoising by the same rule.

    The exports are those of spiffy_calibrate; the graphs of `also` are tried on the same model.
    With `caches` the model may be one without a graph.
    """

    EXAMPLE: ClassVar[str] = "model=runs/spiffy_calibrate/export sampler=[threshold=0.9]"

    temperatures: tuple[float, ...] = option((0.0,), "of the sampling; 0 is greedy", least=0)
    caches: tuple[str, ...] = option((), "approximate caches to measure too, of [prefix,dual]")


class Watch:
    """An observer of a sampler: the steps of its passes and the time of its stages.

    Attributes:
        blocks: Of the request being decoded: by the position where a block begins, how many steps
            each pass over it took, which is one more than the drafts that the pass accepted. A
            first step that was taken on the pass before counts as a draft of the block's first.
        seconds: By stage, over all decodes.
    """

    def __init__(self, sampler: DenoiseSampler):
        self.blocks: dict[int, list[int]] = {}
        self.seconds: Counter[str] = Counter()
        self._finished, sampler.finished = sampler.finished, self._note
        for stage, methods in STAGES.items():
            for name in methods:
                if hasattr(sampler, name):
                    setattr(sampler, name, self._timed(stage, getattr(sampler, name)))

    def take(self) -> list[list[int]]:
        """The steps of the finished decode by block, the first block first; then forget them."""
        done, self.blocks = [steps for _, steps in sorted(self.blocks.items())], {}
        return done

    def _note(self, batch: Batch):
        taken = self.blocks.setdefault(int(batch.state.start[0]), [])
        taken.append(int(batch.state.step[0]) - sum(taken))
        return self._finished(batch)

    def _timed(self, stage: str, call):
        def timed(*arguments):
            started = perf_counter()
            done = call(*arguments)
            self.seconds[stage] += perf_counter() - started
            return done

        return timed


@dataclass
class Row:
    """One way to decode at one temperature; lists have an item for each prompt."""

    name: str
    sampler: DenoiseSampler
    watch: Watch
    temperature: float
    lengths: list[int] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)
    steps: list[list[list[int]]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def rates(self) -> list[float]:
        """Tokens/s of each prompt."""
        return [len(r.token_ids) / s for r, s in zip(self.results, self.seconds)]

    @property
    def nfe(self) -> list[int]:
        """Network passes of each prompt."""
        return [sum(map(len, blocks)) for blocks in self.steps]

    @property
    def nfe_until_end(self) -> list[int]:
        """Network passes of each prompt up to the block with the first end token."""
        kept = zip(self.results, self.steps, self.lengths)
        return [sum(map(len, steps[: self.ending(result, n)])) for result, steps, n in kept]

    def ending(self, result: Result, prompt_length: int) -> int:
        """The number of blocks up to the one with the first end token."""
        ids, L = result.token_ids, self.sampler.block_size
        end = next((n for n, t in enumerate(ids) if t in self.sampler.eos), len(ids) - 1)
        begun = prompt_length % L if self.sampler.causal else 0
        return (begun + end) // L + 1


def run(argv: list[str]) -> None:
    """Run the command with its arguments `key=value`."""
    quiet()
    bench = parse(argv, DenoiseBench, "decoding.bench.denoise")
    with results(results_folder(bench, "bench")) as out:
        report(bench, measure(bench), out)


def measure(bench: DenoiseBench) -> list[Row]:
    """Decode every prompt in every way."""
    options = bench.placing | {"trust_remote_code": bench.trust_remote_code}
    loaded = load(bench.model, sampler=("method=denoise",), **options)
    rows = [row for t in bench.temperatures for row in _rows(bench, loaded, t)]
    tokenizer = loaded.tokenizer
    prompts = heldout_prompts(tokenizer=tokenizer, **bench.prompt_set)
    for row in rows:  # warm-up: allocations, kernels' first calls
        decode(bench, row, prompts[0]["prompt_ids"], bench.seed)
        row.watch.seconds.clear()
        for kept in (row.lengths, row.results, row.steps, row.seconds):
            kept.clear()
    for i, prompt in enumerate(track(prompts, "denoise bench")):
        for row in rows:
            decode(bench, row, prompt["prompt_ids"], bench.seed + i)
    return rows


def decode(bench: DenoiseBench, row: Row, prompt: list[int], seed: int) -> None:
    """Decode one prompt, and append its result and costs to the row."""
    params = SamplingParams(
        max_new_tokens=bench.max_new_tokens,
        temperature=row.temperature,
        ignore_eos=bench.ignore_eos,
        lossy=row.sampler.cache is not None,  # `caches` asks for it
    )
    started = perf_counter()
    row.results += row.sampler.generate([prompt], params, seeds=[seed])
    row.seconds.append(perf_counter() - started)
    row.steps.append(row.watch.take())
    row.lengths.append(len(prompt))


def _rows(bench: DenoiseBench, loaded: DenoiseSampler, temperature: float) -> list[Row]:
    drafting = {*spiffy.KNOBS} - {*denoise.KNOBS}
    common = [knob for knob in bench.sampler if knob.partition("=")[0] not in drafting]
    # Knobs of drafts change nothing of vanilla denoising, which does not know them.
    configs = {"denoise": sampling_config(bench.model, ("method=denoise", *common))}
    for way, knob in itertools.product(bench.caches, ("cache", "draft_cache")):
        method, given = ("denoise", common) if knob == "cache" else ("spiffy", bench.sampler)
        knobs = (*given, f"method={method}", f"{knob}={way}")
        configs[f"{method} ({knob}={way})"] = sampling_config(bench.model, knobs)
    for path, name in told_apart((bench.model, *bench.also)).items():
        if "graph" not in parade_config(path):
            if bench.caches and path == bench.model:
                continue
            raise ValueError(
                f"{path} has no draft graph: python -m trainers.fit recipe=spiffy_calibrate "
                "makes an export with one"
            )
        configs[f"spiffy ({name})"] = sampling_config(path, bench.sampler)
    samplers = {n: sampler_of(c, loaded.target, loaded.tokenizer) for n, c in configs.items()}
    return [Row(name, s, Watch(s), temperature) for name, s in samplers.items()]


def summary(row: Row, plain: Row) -> dict:
    """A row of the first table, by column; ratios are against vanilla denoising (`plain`)."""
    taken = [n for blocks in row.steps for steps in blocks for n in steps]
    model = sum(r.stats.target_s for r in row.results)
    seconds = dict(row.watch.seconds)
    seconds["verify"] = seconds.get("verify", 0.0) - seconds.get("rank", 0.0)
    pairs = [(a.token_ids, b.token_ids) for a, b in zip(row.results, plain.results)]
    positions = sum(max(len(a), len(b)) for a, b in pairs)
    changed = sum(x != y for a, b in pairs for x, y in zip_longest(a, b))
    return {
        "sampler": row.name,
        "temperature": row.temperature,
        "NFE": sum(row.nfe),
        "NFE speed-up": round(sum(plain.nfe) / sum(row.nfe), 2),
        "up to the end": round(sum(plain.nfe_until_end) / sum(row.nfe_until_end), 2),
        "draft passes": sum(r.stats.drafter_passes for r in row.results),
        "drafts a pass": round(fmean(taken) - 1, 2),
        "tokens/s": round(sum(len(r.token_ids) for r in row.results) / sum(row.seconds), 1),
        "speed-up": round(median(a / b for a, b in zip(row.rates, plain.rates)), 2),
        **{f"{s} %": round(100 * seconds.get(s, 0.0) / model, 1) for s in STAGES},
        "identical": f"{sum(a == b for a, b in pairs)}/{len(pairs)}",
        "changed %": round(100 * changed / positions, 2),
        "lossy": row.results[0].stats.lossy,
    }


def report(bench: DenoiseBench, rows: list[Row], out: Path) -> None:
    """Print the tables; write denoise.csv, accepted.csv, accepted.png and graph.png."""
    plain = {row.temperature: row for row in rows if row.name == "denoise"}
    lines = [summary(row, plain[row.temperature]) for row in rows]
    most = f"{bench.max_new_tokens} tokens at the most"
    title = f"{bench.prompts} prompts of {Path(bench.source).name}, {most}, {bench.dtype}"
    write_table(lines, out / "denoise.csv", title, "decoding.bench.denoise")
    print("NFE: network passes; up to the end: NFE speed-up over blocks up to the first end token;")
    print("drafts, verify, rank: seconds in per cent of those in the network's passes;")
    print("draft passes: with an approximate cache; changed: positions with another token")
    drafted = [row for row in rows if isinstance(row.sampler, SpiffySampler)]
    lines = [accepted(row, max(len(by_level(r)) for r in drafted)) for row in drafted]
    title = "share of passes that accept each level; accepted drafts a pass in each block"
    write_table(lines, out / "accepted.csv", title, "decoding.bench.denoise")
    draw_accepted(drafted, out / "accepted.png")
    graphs = {row.name: row.sampler.graph for row in drafted if row.sampler.graph.nodes}
    if graphs:
        draw_graphs(graphs, out / "graph.png")


def accepted(row: Row, levels: int) -> dict:
    """A row of the second table, by column; `levels` columns of levels, then the blocks."""
    shares = [*by_level(row), *[0.0] * levels][:levels]
    named = {f"level {n}": round(share, 3) for n, share in enumerate(shares, 1)}
    named |= {f"block {n}": round(mean, 3) for n, mean in enumerate(by_block(row), 1)}
    return {"sampler": row.name, "temperature": row.temperature, **named}


def by_level(row: Row) -> list[float]:
    """The share of passes that accepted a draft of level 1, 2, ..."""
    taken = [n for blocks in row.steps for steps in blocks for n in steps]
    return [sum(n > level for n in taken) / len(taken) for level in range(1, max(taken))]


def by_block(row: Row) -> list[float]:
    """Accepted drafts a pass in the first block, the second, ..."""
    blocks = zip_longest(*row.steps, fillvalue=[])
    return [fmean(n - 1 for steps in block for n in steps) for block in blocks]


def draw_accepted(rows: list[Row], file: Path) -> None:
    """Draw the share of passes that accepted at least n drafts, and drafts a pass in each block."""
    with picture(file, ncols=2, figsize=(11, 3.8)) as axes:
        for row in rows:
            label = f"{row.name}, T={row.temperature:g}"
            for axis, values in zip(axes[0], (by_level(row), by_block(row))):
                axis.plot(range(1, 1 + len(values)), values, "o-", label=label)
        axes[0, 0].set_xlabel("level")
        axes[0, 0].set_ylabel("share of passes that accept it")
        axes[0, 1].set_xlabel("block")
        axes[0, 1].set_ylabel("accepted drafts a pass")
        for axis in axes.flat:
            axis.xaxis.get_major_locator().set_params(integer=True)
            axis.legend(frameon=False)


def draw_graphs(graphs: dict[str, DraftGraph], file: Path) -> None:
    """Draw each draft graph by levels, from the current state down."""
    with picture(file, ncols=len(graphs), figsize=(6 * len(graphs), 5)) as axes:
        for axis, (name, graph) in zip(axes[0], graphs.items()):
            positions = {0: (0.0, 0)}
            for level in sorted({*graph.levels}):
                here = [n for n, found in enumerate(graph.levels, 1) if found == level]
                positions |= {n: (i - (len(here) - 1) / 2, -level) for i, n in enumerate(here)}
            for n, parents in enumerate(graph.parents, 1):
                for p in parents:
                    axis.plot(*zip(positions[p], positions[n]), color="0.7", zorder=1)
            for n, position in positions.items():
                axis.annotate(
                    show(graph.formula(n)), position, ha="center", va="center", fontsize=7,
                    bbox={"boxstyle": "round", "facecolor": "white"},
                )  # fmt: skip
            axis.set_title(name)
            axis.set_axis_off()
            axis.margins(0.2)


if __name__ == "__main__":
    main(run)
