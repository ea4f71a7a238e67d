"""`python -m decoding.bench.infill model=... judge=...`: ways to draft side by side.

Fewer passes must not change the distribution of the texts: a judge's perplexity and each text's
entropy are compared with sequential decoding by Welch's t-test (arXiv 2504.20456, E.4). A filled
middle is also compared with the original by ROUGE, and a filled line of a program is tested.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import ClassVar, Literal

from data.arguments import BlockSize, Count, Several, Small, Temperature, Tokens
from decoding.bench.options import ProgramOptions, results_folder
from decoding.engine.params import Result, SamplingParams
from decoding.report import results, write_table
from recipes.command import main
from recipes.options import SourceOptions, check_first, option, parse
from recipes.values import unknown
from terminal.progress import track

HIDE = ("random", "middle", "lines", "suffix")
ROUGE = ("rouge1", "rouge2", "rougeL")


@dataclass(frozen=True, kw_only=True)
class InfillBench(SourceOptions, ProgramOptions):
    """Fill held-out texts with every way to draft; calls, seconds, perplexity, entropy.

    With a file of HumanEval-infilling as source the holes are the problems' own, each of as many
    tokens as its solution has, and `execute` runs the programs.
    """

    EXAMPLE: ClassVar[str] = "model=runs/asarm_joint/export judge=runs/ar_target/export hide=middle"

    judge: str | None = option(None, "a causal LM that rates the filled texts; null: no perplexity")
    samples: Count = option(128, "windows of held-out text, or problems")
    trials: Count = option(1, "fillings of each window by each way")
    packed: bool = option(False, "windows of packed documents, as in training (WikiText's lines)")
    length: Tokens = option(256, "tokens of a window")
    hidden: float = option(0.95, "share of each window that is hidden")
    hide: Literal[*HIDE] = option("random", "anywhere, the middle, lines, or all after a prefix")
    sampler: tuple[str, ...] = option((), "knobs, or a method as [method=asarm] for XLNet")
    drafts: tuple[str, ...] = option((), "ways to draft beside sequential and nodes=; none: all")
    block_sizes: Several[BlockSize] = option((5,), "k of the ways that draft")
    nodes: tuple[Small, ...] = option((), "sizes of the trees of assd_fused with verify=tree")
    knobs: tuple[str, ...] = option((), "every way once with each, as [cache=true,cache=false]")
    lossy: bool = option(False, "allow knobs that are not lossless, as tolerance=0.05 (Table 8)")
    batch_size: Count = option(8, "windows that are filled together")
    temperature: Temperature = option(1.0, "of the sampling; 0 is greedy")


def read_options(argv: list[str]) -> InfillBench:
    """Return the command's options."""
    return parse(argv, InfillBench, "decoding.bench.infill")


check_first(__name__, read_options)

import torch
from scipy.stats import ttest_ind
from transformers import PreTrainedTokenizerBase

from data.corpora.benchmarks import Problem, is_benchmark, program, read_benchmark
from data.rows.documents import packed_windows
from data.text.prompts import heldout_prompts
from decoding.any_subset.infilling import Template
from decoding.bench.judge import Judge
from decoding.bench.rows import ERROR, Row, mean_error, spread
from decoding.bench.sandbox import check, execute
from decoding.engine.detokenize import text_after
from decoding.engine.sampler import Sampler
from decoding.loading import load, sampler_of, sampling_config


@dataclass
class Task:
    """A text with holes: token ids with None in the holes, or a text with `<hole:n>`.

    `hidden` is the hidden text, None if tokens anywhere are hidden; a window of text has no
    `problem`.
    """

    prompt: list[int | None] | str
    hidden: str | None = None
    problem: Problem | None = None

    @property
    def before(self) -> list[int]:
        """Return the tokens before the first hole, of a window."""
        return [] if isinstance(self.prompt, str) else Template(self.prompt).before


@dataclass
class FilledRow(Row):
    """One way to draft, with the figures of each window."""

    knob: str = ""
    nodes: int | None = None
    perplexity: list[float] = field(default_factory=list)
    entropy: list[float] = field(default_factory=list)
    rouge: list[tuple[float, ...]] = field(default_factory=list)
    passed: list[bool] = field(default_factory=list)
    passes: int = 0  # of a batch, however many of its requests take part
    network_s: float = 0.0

    @property
    def calls(self) -> list[int]:
        """Return the network passes of each window."""
        return [s.target_passes for s in self.stats]

    def fill(self, tasks: list[Task], seed: int) -> list[Result]:
        """Fill a batch, and count its passes."""
        self.params = replace(self.params, seed=seed)
        results = self.decode([task.prompt for task in tasks])
        self.passes += max(r.stats.target_passes for r in results)
        self.network_s += max(r.stats.target_s for r in results)
        return results

    def rate_text(self, task: Task, result: Result, bench: InfillBench, judge: Judge | None):
        """Add the figures of one filled text."""
        tokenizer = self.sampler.tokenizer
        if judge is not None:
            self.perplexity.append(judge.perplexity(result.text))
            self.entropy.append(judge.entropy(result.text))
        if task.hidden is not None:
            said = text_after(tokenizer, task.before, result.token_ids)
            self.rouge.append(rouge(said, task.hidden))
        if task.problem is not None and bench.execute:
            code = program(task.problem, filling(task.problem, result, tokenizer))
            assert code is not None  # problems of infilling have tests
            self.passed.append(execute(code, bench).outcome == "passed")


def run(argv: list[str]) -> None:
    """Run the command with its arguments `key=value`."""
    bench = read_options(argv)
    with results(results_folder(bench, "bench")) as out:
        report(bench, measure(bench), out)


def measure(bench: InfillBench) -> list[FilledRow]:
    """Fill every window in every way, batch by batch, the ways in turn."""
    first = load(bench.model, sampler=bench.sampler, **bench.placing)
    if first.continues:
        raise ValueError(f"{bench.model} does not fill holes: python -m decoding.bench serves it")
    judge = None if bench.judge is None else Judge.load(bench.judge, **bench.placing)
    todo = tasks(bench, first.tokenizer)
    rows = [row for knob in bench.knobs or ("",) for row in ways(bench, first, knob)]
    steps = [(t, at) for t in range(bench.trials) for at in range(0, len(todo), bench.batch_size)]
    for trial, start in track(steps, "infill bench"):
        batch = todo[start : start + bench.batch_size]
        for i, row in enumerate(rows):
            # Each way draws independently: a t-test compares independent samples.
            seed = bench.seed + start + (trial * len(rows) + i) * bench.samples
            for task, result in zip(batch, row.fill(batch, seed)):
                row.rate_text(task, result, bench, judge)
    return rows


def tasks(bench: InfillBench, tokenizer: PreTrainedTokenizerBase) -> list[Task]:
    """Return a bench's texts with holes: infilling problems, or held-out windows."""
    if problems := infilling_problems(bench):
        return problem_tasks(bench, problems, tokenizer)
    if bench.execute:
        raise ValueError(
            f"execute={bench.execute}, but source={bench.source!r} has no problems of infilling, "
            "with 'suffix', 'canonical_solution' and tests"
        )
    where: dict = {"split": bench.split, "subset": bench.subset, "limit": bench.limit}
    given = bench.source, tokenizer, bench.samples, bench.length
    if bench.packed:
        windows = packed_windows(*given, **where)
    else:
        windows = [w["prompt_ids"] for w in heldout_prompts(*given, **where, chat=False)]
    found = [Task(prompt) for prompt in hide(bench, windows, tokenizer)]
    if bench.hide != "random":
        for task, ids in zip(found, windows):
            hidden = [t for t, p in zip(ids, task.prompt) if p is None]
            task.hidden = text_after(tokenizer, task.before, hidden)
    return found


def infilling_problems(bench: InfillBench) -> list[Problem]:
    """Return the infilling problems of a bench's source; none if the source has none."""
    known = is_benchmark(bench.source)
    problems = read_benchmark(bench.source, subset=bench.subset) if known else []
    return [problem for problem in problems if problem.suffix is not None]


def problem_tasks(
    bench: InfillBench, problems: list[Problem], tokenizer: PreTrainedTokenizerBase
) -> list[Task]:
    """Return infilling problems, each with a hole of as many tokens as its solution has."""
    if len(problems) < bench.samples:
        raise ValueError(
            f"{bench.source!r} has {len(problems)} problems, fewer than samples={bench.samples}"
        )
    check(bench)
    found = []
    for problem in problems[: bench.samples]:
        size = len(tokenizer(problem.reference, add_special_tokens=False)["input_ids"])
        prompt = f"{problem.turns[0]}<hole:{max(1, size)}>{problem.suffix}"
        found.append(Task(prompt, problem.reference, problem))
    return found


def filling(problem: Problem, result: Result, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the text filled into a problem's hole.

    It is cut from the whole text if possible, which needs no tokens.
    """
    before, after, text = problem.turns[0], problem.suffix or "", result.text
    if text.startswith(before) and text.endswith(after) and len(text) >= len(before) + len(after):
        return text[len(before) : len(text) - len(after)]
    prompt = tokenizer(before, add_special_tokens=False).input_ids
    return text_after(tokenizer, prompt, result.token_ids)


def ways(bench: InfillBench, first: Sampler, knob: str) -> list[FilledRow]:
    """Return the ways to draft of an export's sampler with one knob changed ('': none)."""
    config = sampling_config(bench.model, [*bench.sampler, *([knob] if knob else [])])
    sampler = sampler_of(config, first.target, first.tokenizer)
    plain, *others = sampler.drafts
    for name in bench.drafts:
        if name not in sampler.drafts:
            raise unknown("draft", name, sampler.drafts)
    others = [name for name in others if name in (bench.drafts or others)]
    found: list[tuple[Sampler, str, int | None, int | None]] = [(sampler, plain, None, None)]
    found += [(sampler, draft, k, None) for draft in others for k in bench.block_sizes]
    for n in bench.nodes:
        trees = sampler_of({**config, "nodes": n}, first.target, first.tokenizer)
        found += [(trees, "assd_fused", k, n) for k in bench.block_sizes]
    rows: list[FilledRow] = []
    for by, draft, k, nodes in found:
        shared: dict = {"temperature": bench.temperature, "lossy": bench.lossy}
        verify = "tree" if nodes else "rejection"
        params = SamplingParams(verify=verify, draft=draft, block_size=k, **shared)
        given = draft, by, params, bench.batch_size, rows[0] if rows else None
        rows.append(FilledRow(*given, knob=knob, nodes=nodes))
    return rows


def hide(
    bench: InfillBench, windows: list[list[int]], tokenizer: PreTrainedTokenizerBase
) -> list[list[int | None]]:
    """Return the windows with None at a share of their positions (`hide`, `hidden`)."""
    generator = torch.Generator().manual_seed(bench.seed)
    hidden = []
    for ids in windows:
        n = len(ids)
        inside = middle(n, bench.hidden)
        if bench.hide == "lines":  # a token belongs to the line that it begins in
            line = [tokenizer.decode(ids[:i]).count("\n") for i in range(n)]
            lines = middle(line[-1] + 1, bench.hidden)
            positions = {i for i in range(n) if line[i] in lines}
        elif bench.hide == "middle":
            positions = {*inside}
        elif bench.hide == "suffix":
            positions = {*range(n - len(inside), n)}
        else:
            positions = {*torch.randperm(n, generator=generator).tolist()[: len(inside)]}
        hidden.append([None if i in positions else t for i, t in enumerate(ids)])
    return hidden


def middle(count: int, share: float) -> range:
    """Return the middle share of `count` items, at least one.

    >>> middle(5, 0.6)
    range(1, 4)
    """
    inside = max(1, round(share * count))
    first = (count - inside) // 2
    return range(first, first + inside)


def rouge(text: str, reference: str) -> tuple[float, ...]:
    """Return the F-measures of ROUGE-1, -2 and -L in percent, of lower-cased words and digits.

    >>> rouge("x = one", "x = two")
    (50.0, 0.0, 50.0)
    """
    from torchmetrics.functional.text import rouge_score

    scores = rouge_score(text, reference, rouge_keys=ROUGE)
    return tuple(100 * scores[f"{name}_fmeasure"].item() for name in ROUGE)


def summary(row: FilledRow) -> dict:
    """Return a row of the table, by column; ratios and p-values are against sequential decoding."""
    plain, lossy = row.plain or row, row.stats[0].lossy
    line: dict = {"knob": row.knob} if row.knob else {}
    line["draft"] = f"{row.name} (lossy: {lossy})" if lossy else row.name
    if row.nodes:
        line["draft"] += f", trees of {row.nodes}"
    line["k"] = row.params.block_size or ""
    line["calls"] = spread(row.calls)
    ratio = fmean(row.calls) / fmean(plain.calls)
    line["calls / sequential"] = round(ratio, 3)
    # Both are of the same windows: the error of a ratio of means, by its residuals.
    rest = [ours - ratio * theirs for ours, theirs in zip(row.calls, plain.calls)]
    line[f"calls / sequential{ERROR}"] = round(mean_error(rest) / fmean(plain.calls), 3)
    line["speed-up"] = round(sum(plain.seconds) / sum(row.seconds), 2)
    line["ms a pass"] = round(1000 * row.network_s / row.passes, 2)
    for name in ("perplexity", "entropy"):
        here, there = getattr(row, name), getattr(plain, name)
        if here:
            p = ttest_ind(here, there, equal_var=False).pvalue
            line[name] = spread(here)
            line[f"p ({name})"] = "" if row is plain else round(float(p), 2)
    for name, values in zip(ROUGE, zip(*row.rouge)):
        line[name.replace("rouge", "ROUGE-")] = spread(values)
    if row.passed:
        line["pass@1, %"] = spread([100.0 * right for right in row.passed])
    return line


def report(bench: InfillBench, rows: list[FilledRow], out: Path) -> None:
    """Print the table, and write infill.csv and the command."""
    what = f"windows of {bench.length} tokens, {bench.hidden:.0%} hidden ({bench.hide})"
    if infilling_problems(bench):
        what = f"problems of {Path(bench.source).name}"
    title = f"{bench.samples} {what}, batch {bench.batch_size}, {bench.dtype}"
    lines = [*map(summary, rows)]
    write_table(lines, out / "infill.csv", title, "decoding.bench.infill")
    best = min(lines, key=lambda line: line["calls / sequential"])
    share = f"{best['calls / sequential']} ± {best['calls / sequential ±']}"
    print(f"fewest calls: {best['draft']}, k = {best['k']}: {share} of the sequential calls")
    print("calls: network passes a window; p: Welch's t-test against sequential decoding")
    print("ms a pass: the network's time for a batch, the pass that brings the prompt included")


if __name__ == "__main__":
    main(run)
