"""`python -m decoding.bench.denoise model=runs/spiffy_calibrate/export`: passes saved by drafts.

Every held-out prompt is decoded by vanilla denoising and by each draft graph in turn, one prompt at
a time, after a warm-up. NFE are network passes; the speed-up in NFE is computed over all tokens
and, as published, over the blocks up to the first end token.
"""

from collections import Counter
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from statistics import fmean, median
from time import perf_counter
from typing import ClassVar

from data.arguments import Several, Temperature
from decoding.bench.options import PromptBenchOptions, results_folder, told_apart
from decoding.bench.rows import Row, params_of, questions, take_turns
from decoding.engine.batch import Batch
from decoding.engine.params import Result
from decoding.loading import load, parade_config, sampler_of, sampling_config
from decoding.masked.draft_graph import DraftGraph, show
from decoding.report import picture, results, write_table
from decoding.samplers import denoise, spiffy
from decoding.samplers.denoise import DenoiseSampler
from decoding.samplers.spiffy import SpiffySampler
from recipes.command import main
from recipes.options import option, parse

# And the methods of a sampler whose seconds they are; ranking is part of verifying.
STAGES = {"drafts": ("drafts",), "verify": ("verify", "begin_next"), "rank": ("rank",)}


@dataclass(frozen=True, kw_only=True)
class DenoiseBench(PromptBenchOptions):
    """Compare an export's draft graph with vanilla denoising by the same rule.

    The exports are those of spiffy_calibrate; the graphs of `also` are tried on the same model.
    """

    EXAMPLE: ClassVar[str] = "model=runs/spiffy_calibrate/export sampler=[threshold=0.9]"

    temperatures: Several[Temperature] = option((0.0,), "of the sampling; 0 is greedy")


class Watch:
    """A sampler's observer: counts the steps of its passes and times its stages.

    Attributes:
        blocks: By the position where a block of the current request begins, the steps that each
            pass over it took: the accepted drafts plus one. A first step taken on the pass before
            counts as a draft of the block's first pass.
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
        """Return the steps of the finished decode by block, first block first, and forget them."""
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
class WatchedRow(Row):
    """One way to decode at one temperature; `steps` has an item for each prompt."""

    watch: Watch | None = None
    steps: list[list[list[int]]] = field(default_factory=list)
    prompts: list[int] = field(default_factory=list)  # the number of tokens of each

    def decode(self, prompts: list[list[int]], seeds: list[int]) -> None:
        super().decode(prompts, seeds)
        self.steps.append(self.watch.take())
        self.prompts += map(len, prompts)

    def warm_up(self, prompts: list[list[int]]) -> None:
        super().warm_up(prompts)
        self.watch.take()
        self.watch.seconds.clear()

    @property
    def nfe(self) -> list[int]:
        """Return the network passes of each prompt."""
        return [sum(map(len, blocks)) for blocks in self.steps]

    @property
    def nfe_until_end(self) -> list[int]:
        """Return the network passes of each prompt up to the block with the first end token."""
        kept = zip(self.results, self.steps, self.prompts)
        return [sum(map(len, steps[: self.ending(result, n)])) for result, steps, n in kept]

    def ending(self, result: Result, prompt_length: int) -> int:
        """Return the number of blocks up to the one with the first end token."""
        ids, L = result.token_ids, self.sampler.block_size
        end = next((n for n, t in enumerate(ids) if t in self.sampler.eos), len(ids) - 1)
        begun = prompt_length % L if self.sampler.causal else 0
        return (begun + end) // L + 1


def run(argv: list[str]) -> None:
    """Run the command with its arguments `key=value`."""
    bench = parse(argv, DenoiseBench, "decoding.bench.denoise")
    with results(results_folder(bench, "bench")) as out:
        report(bench, measure(bench), out)


def measure(bench: DenoiseBench) -> list[WatchedRow]:
    """Decode every prompt in every way."""
    options = bench.placing | {"trust_remote_code": bench.trust_remote_code}
    loaded = load(bench.model, sampler=("method=denoise",), **options)
    rows = [row for t in bench.temperatures for row in _rows(bench, loaded, t)]
    take_turns(rows, questions(bench, loaded.tokenizer), bench.seed, "denoise bench")
    return rows


def _rows(bench: DenoiseBench, loaded: DenoiseSampler, temperature: float) -> list[WatchedRow]:
    drafting = spiffy.METHOD.options.keys() - denoise.METHOD.options.keys()
    common = [knob for knob in bench.sampler if knob.partition("=")[0] not in drafting]
    # Knobs of drafts change nothing of vanilla denoising, which does not know them.
    configs = {"denoise": sampling_config(bench.model, ("method=denoise", *common))}
    for path, name in told_apart((bench.model, *bench.also)).items():
        if "graph" not in parade_config(path):
            raise ValueError(
                f"{path} has no draft graph: python -m trainers.fit recipe=spiffy_calibrate "
                "makes an export with one"
            )
        configs[f"spiffy ({name})"] = sampling_config(path, bench.sampler)
    samplers = {n: sampler_of(c, loaded.target, loaded.tokenizer) for n, c in configs.items()}
    rows = []
    for name, sampler in samplers.items():
        params = params_of(bench, temperature=temperature)
        plain = rows[0] if rows else None
        rows.append(WatchedRow(name, sampler, params, plain=plain, watch=Watch(sampler)))
    return rows


def summary(row: WatchedRow) -> dict:
    """Return a row of the first table, by column; ratios are against vanilla denoising."""
    plain = row.plain or row
    taken = [n for blocks in row.steps for steps in blocks for n in steps]
    model = sum(s.target_s for s in row.stats)
    seconds = dict(row.watch.seconds)
    seconds["verify"] = seconds.get("verify", 0.0) - seconds.get("rank", 0.0)
    return {
        "sampler": row.name,
        "temperature": row.params.temperature,
        "NFE": sum(row.nfe),
        "NFE speed-up": round(sum(plain.nfe) / sum(row.nfe), 2),
        "up to the end": round(sum(plain.nfe_until_end) / sum(row.nfe_until_end), 2),
        "drafts a pass": round(fmean(taken) - 1, 2),
        "tokens/s": round(row.rate, 1),
        "speed-up": round(median(row.speedups), 2),
        **{f"{s} %": round(100 * seconds.get(s, 0.0) / model, 1) for s in STAGES},
        "identical": row.same,
    }


def report(bench: DenoiseBench, rows: list[WatchedRow], out: Path) -> None:
    """Print the tables; write denoise.csv, accepted.csv and graph.png."""
    most = f"{bench.max_new_tokens} tokens at the most"
    title = f"{bench.prompts} prompts of {Path(bench.source).name}, {most}, {bench.dtype}"
    command = "decoding.bench.denoise"
    write_table([*map(summary, rows)], out / "denoise.csv", title, command)
    print("NFE: network passes; up to the end: NFE speed-up over blocks up to the first end token;")
    print("drafts, verify, rank: seconds in per cent of those in the network's passes;")
    drafted = [row for row in rows if isinstance(row.sampler, SpiffySampler)]
    lines = [accepted(row, max(len(by_level(r)) for r in drafted)) for row in drafted]
    title = "share of passes that accept each level; accepted drafts a pass in each block"
    write_table(lines, out / "accepted.csv", title, command)
    graphs = {row.name: row.sampler.graph for row in drafted if row.sampler.graph.nodes}
    if graphs:
        draw_graphs(graphs, out / "graph.png")


def accepted(row: WatchedRow, levels: int) -> dict:
    """Return a row of the second table, by column: the first `levels` levels, then the blocks."""
    shares = [*by_level(row), *[0.0] * levels][:levels]
    named = {f"level {n}": round(share, 3) for n, share in enumerate(shares, 1)}
    named |= {f"block {n}": round(mean, 3) for n, mean in enumerate(by_block(row), 1)}
    return {"sampler": row.name, "temperature": row.params.temperature, **named}


def by_level(row: WatchedRow) -> list[float]:
    """Return the share of passes that accepted a draft of level 1, 2, ..."""
    taken = [n for blocks in row.steps for steps in blocks for n in steps]
    return [sum(n > level for n in taken) / len(taken) for level in range(1, max(taken))]


def by_block(row: WatchedRow) -> list[float]:
    """Return the accepted drafts per pass in the first block, the second, ..."""
    blocks = zip_longest(*row.steps, fillvalue=[])
    return [fmean(n - 1 for steps in block for n in steps) for block in blocks]


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
