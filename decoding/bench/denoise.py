"""`python -m decoding.bench.denoise model=runs/spiffy_calibrate/export`: passes saved by drafts."""

from collections import Counter
from dataclasses import dataclass, field
from math import isnan
from pathlib import Path
from statistics import fmean
from time import perf_counter
from typing import ClassVar

from data.arguments import Several, Temperature
from decoding.bench.options import PromptBenchOptions, results_folder, told_apart
from decoding.report import counted, draws, picture, results, write_table
from recipes.command import main
from recipes.options import check_first, option, parse

# And the methods of a sampler whose seconds they are; ranking is part of verifying.
STAGES = {"drafts": ("draft_states",), "verify": ("verify", "begin_next"), "rank": ("rank",)}


@dataclass(frozen=True, kw_only=True)
class DenoiseBench(PromptBenchOptions):
    """Compare an export's draft graph with vanilla denoising by the same rule.

    The exports are those of spiffy_calibrate; the graphs of `also` are tried on the same model.
    """

    EXAMPLE: ClassVar[str] = "model=runs/spiffy_calibrate/export sampler=[threshold=0.9]"

    temperatures: Several[Temperature] = option((0.0,), "of the sampling; 0 is greedy")
    judge: str | None = option(None, "a causal LM that rates the texts; null: no perplexity")


def read_options(argv: list[str]) -> DenoiseBench:
    """Return the command's options."""
    return parse(argv, DenoiseBench, "decoding.bench.denoise")


check_first(__name__, read_options)

from decoding.bench.judge import Judge
from decoding.bench.rows import Row, params_of, questions, spread, take_turns
from decoding.engine.batch import Batch
from decoding.engine.sampler import Sampler
from decoding.loading import load, parade_config, sampler_of, sampling_config
from decoding.masked.draft_graph import DraftGraph, show
from decoding.samplers import denoise, spiffy
from decoding.samplers.denoise import DenoiseSampler
from decoding.samplers.spiffy import SpiffySampler


class Watch:
    """A sampler's observer: counts the steps of its passes and times its stages.

    Attributes:
        taken: The steps that each pass took: its accepted drafts plus one. A first step taken on
            the pass before counts as a draft of the block's first pass.
        seconds: By stage, over all decodes.
    """

    def __init__(self, sampler: DenoiseSampler):
        self.taken: list[int] = []
        self.seconds: Counter[str] = Counter()
        self._before = 0  # steps of the current block in the passes so far
        self._finished = sampler.finished
        sampler.finished = self._note  # type: ignore[method-assign]  # it observes
        for stage, methods in STAGES.items():
            for name in methods:
                if hasattr(sampler, name):
                    setattr(sampler, name, self._timed(stage, getattr(sampler, name)))

    def _note(self, batch: Batch):
        self.taken.append(int(batch.state.step[0]) - self._before)
        found = self._finished(batch)
        self._before = int(batch.state.step[0])  # 0 at the end of a block
        return found

    def _timed(self, stage: str, call):
        def timed(*arguments):
            started = perf_counter()
            done = call(*arguments)
            self.seconds[stage] += perf_counter() - started
            return done

        return timed


@dataclass
class WatchedRow(Row):
    """One way to decode at one temperature, with its judge's figures of each text."""

    watch: Watch = field(kw_only=True)
    perplexity: list[float] = field(default_factory=list)
    entropy: list[float] = field(default_factory=list)

    def warm_up(self, prompts: list[list[int]]) -> None:
        super().warm_up(prompts)
        self.watch.taken.clear()
        self.watch.seconds.clear()

    @property
    def nfe(self) -> int:
        """Return the network passes of all prompts."""
        return sum(s.target_passes for s in self.stats)


def run(argv: list[str]) -> None:
    """Run the command with its arguments `key=value`."""
    bench = read_options(argv)
    draws()  # said before the work
    with results(results_folder(bench, "bench")) as out:
        report(bench, measure(bench), out)


def measure(bench: DenoiseBench) -> list[WatchedRow]:
    """Decode every prompt in every way."""
    options = bench.placing | {"trust_remote_code": bench.trust_remote_code}
    loaded = load(bench.model, sampler=("method=denoise",), **options)
    rows = [row for t in bench.temperatures for row in _rows(bench, loaded, t)]
    take_turns(rows, questions(bench, loaded.tokenizer), bench.seed, "denoise bench")
    if bench.judge is not None:
        judge = Judge.load(bench.judge, **bench.placing)
        for row in rows:
            texts = [result.text for result in row.results]
            row.perplexity = [p for p in map(judge.perplexity, texts) if not isnan(p)]
            row.entropy = [*map(judge.entropy, texts)]
    return rows


def _rows(bench: DenoiseBench, loaded: Sampler, temperature: float) -> list[WatchedRow]:
    drafting = spiffy.METHOD.options.keys() - denoise.METHOD.options.keys()
    common = [knob for knob in bench.sampler if knob.partition("=")[0] not in drafting]
    # Knobs of drafts change nothing of vanilla denoising, which does not know them.
    configs = {"denoise": sampling_config(bench.model, ("method=denoise", *common))}
    for path, name in told_apart((bench.model, *bench.also)).items():
        if "graph" not in parade_config(path):
            raise ValueError(
                f"{path} has no draft graph: python -m trainers.fit recipe=spiffy_calibrate "
                f"model={path} makes an export with one"
            )
        configs[f"spiffy ({name})"] = sampling_config(path, bench.sampler)
    samplers = {n: sampler_of(c, loaded.target, loaded.tokenizer) for n, c in configs.items()}
    rows: list[WatchedRow] = []
    for name, sampler in samplers.items():
        if not isinstance(sampler, DenoiseSampler):
            raise ValueError(f"sampler={list(bench.sampler)} is not allowed: it does not denoise")
        params = params_of(bench, temperature=temperature)
        plain = rows[0] if rows else None
        rows.append(WatchedRow(name, sampler, params, plain=plain, watch=Watch(sampler)))
    return rows


def summary(row: WatchedRow) -> dict:
    """Return a row of the first table, by column; ratios are against vanilla denoising."""
    plain = row.plain or row
    model = sum(s.target_s for s in row.stats)
    seconds: dict[str, float] = {**row.watch.seconds}
    seconds["verify"] = seconds.get("verify", 0.0) - seconds.get("rank", 0.0)
    return {
        "sampler": row.name,
        "temperature": row.params.temperature,
        "NFE": row.nfe,
        "NFE speed-up": round(plain.nfe / row.nfe, 2),
        "drafts a pass": round(fmean(row.watch.taken) - 1, 2),
        **row.speedup,
        **{f"{s} %": round(100 * seconds.get(s, 0.0) / model, 1) for s in STAGES},
        "identical": row.same,
        **{n: spread(x) for n in ("perplexity", "entropy") if (x := getattr(row, n))},
    }


def report(bench: DenoiseBench, rows: list[WatchedRow], out: Path) -> None:
    """Print the tables; write denoise.csv, accepted.csv and graph.png."""
    prompts = counted(len(rows[0].results), "prompt")
    most = f"{bench.max_new_tokens} tokens at the most"
    title = f"{prompts} of {Path(bench.source).name}, {most}, {bench.dtype}"
    command = "decoding.bench.denoise"
    write_table([*map(summary, rows)], out / "denoise.csv", title, command)
    print("NFE: network passes; up to the first end token, unless ignore_eos=true;")
    print("drafts, verify, rank: seconds in per cent of those in the network's passes;")
    drafted = [row for row in rows if isinstance(row.sampler, SpiffySampler)]
    levels = max(max(row.watch.taken) for row in drafted)
    lines = [accepted(row, levels) for row in drafted]
    write_table(lines, out / "accepted.csv", "share of passes that accept each level", command)
    graphs = {row.name: row.sampler.graph for row in drafted if row.sampler.graph.nodes}
    if graphs and draws():
        draw_graphs(graphs, out / "graph.png")


def accepted(row: WatchedRow, levels: int) -> dict:
    """Return a row of the second table: the share of passes that accepted a draft of each level."""
    taken = row.watch.taken
    shares = {f"level {n}": sum(x > n for x in taken) / len(taken) for n in range(1, levels)}
    named = {"sampler": row.name, "temperature": row.params.temperature}
    return named | {level: round(share, 3) for level, share in shares.items()}


def draw_graphs(graphs: dict[str, DraftGraph], file: Path) -> None:
    """Draw each draft graph by levels, from the current state down."""
    box = {"boxstyle": "round", "facecolor": "white"}
    with picture(file, ncols=len(graphs), figsize=(6 * len(graphs), 5)) as axes:
        for axis, (name, graph) in zip(axes[0], graphs.items()):
            positions, levels = {0: (0.0, 0)}, graph.levels
            for n, (level, parents) in enumerate(zip(levels, graph.parents), 1):
                before, there = levels[: n - 1].count(level), levels.count(level)
                positions[n] = (before - (there - 1) / 2, -level)
                for parent in parents:
                    axis.plot(*zip(positions[parent], positions[n]), color="0.7", zorder=1)
            for n, at in positions.items():
                text = show(graph.formula(n))
                axis.annotate(text, at, ha="center", va="center", fontsize=7, bbox=box)
            axis.set_title(name)
            axis.set_axis_off()
            axis.margins(0.2)


if __name__ == "__main__":
    main(run)
