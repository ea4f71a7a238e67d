"""`python -m decoding.bench.infill model=... judge=...`: ways to draft side by side.

Held-out windows with a share of their tokens hidden are filled by every way to draft. Fewer passes
must not change the distribution of the texts: a judge's perplexity and the entropy of each text are
compared with sequential decoding by Welch's t-test (arXiv 2504.20456, Tables 1, 4 to 9, E.4). A
filled middle is also compared with the original text, by ROUGE (Table 3), and a filled line of a
program is run with its tests (Table 2).
"""

import math
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from time import perf_counter
from typing import ClassVar

import torch
from transformers import PreTrainedTokenizerBase

from data.corpora.benchmarks import Problem, is_benchmark, program, read_benchmark
from data.rows.documents import packed_windows
from data.text.prompts import heldout_prompts
from decoding.bench.generated_text import entropy, generative_perplexity
from decoding.bench.options import UNASKED, ProgramOptions, results_folder
from decoding.bench.sandbox import check, execute
from decoding.commands.cli import main, parse, quiet, unknown
from decoding.commands.options import SourceOptions, option
from decoding.commands.progress import track
from decoding.commands.report import results, write_table
from decoding.engine.params import Result, SamplingParams
from decoding.engine.sampler import Sampler
from decoding.loading import load, load_tokenizer, sampler_of, sampling_config
from decoding.samplers.asarm import AsarmSampler
from models import causal

HIDE = ("random", "middle", "lines", "suffix")
ROUGE = ("rouge1", "rouge2", "rougeL")


@dataclass(frozen=True, kw_only=True)
class InfillBench(SourceOptions, ProgramOptions):
    """Fill held-out texts with every way to draft; calls, seconds, perplexity, entropy.

    With a file of HumanEval-infilling as source the holes are the problems' own, each of as many
    tokens as its solution has, and execute=true runs the programs.
    """

    EXAMPLE: ClassVar[str] = "model=runs/asarm_joint/export judge=runs/ar_target/export hide=middle"

    judge: str | None = option(
        None, "a causal LM that rates the filled texts; null: no perplexity, no entropy"
    )
    samples: int = option(128, "windows of held-out text, or problems", least=1)
    trials: int = option(1, "fillings of each window by each way", least=1)
    packed: bool = option(False, "windows of packed documents, as in training (WikiText's lines)")
    length: int = option(256, "tokens of a window", least=1)
    hidden: float = option(0.95, "share of each window that is hidden")
    hide: str = option(
        "random",
        "tokens anywhere, in the middle, whole lines there, or all after a prefix",
        choices=HIDE,
    )
    sampler: tuple[str, ...] = option(
        (), "of a model without a sampler for holes, as [method=asarm] for XLNet; or knobs"
    )
    drafts: tuple[str, ...] = option(
        (), "the ways to draft beside sequential and nodes=; none: all, [sequential]: no other"
    )
    block_sizes: tuple[int, ...] = option((5,), "k of the ways that draft", least=1)
    nodes: tuple[int, ...] = option((), "sizes of the trees of assd_fused with verify=tree")
    knobs: tuple[str, ...] = option(
        (), "every way once with each, as [cache=true,cache=false] (Table 7)"
    )
    lossy: bool = option(False, "allow knobs that are not lossless, as tolerance=0.05 (Table 8)")
    batch_size: int = option(8, "windows that are filled together", least=1)
    temperature: float = option(1.0, "of the sampling; 0 is greedy", least=0)
    verify: str = option("rejection", "how drafts are verified", choices=AsarmSampler.rules)


@dataclass
class Task:
    """A text with holes.

    Attributes:
        prompt: Token ids with None in the holes, or a text with `<hole:n>`.
        hidden: The text that is hidden; None where tokens anywhere are.
        problem: Of infilling; None for a window of text.
    """

    prompt: list[int | None] | str
    hidden: str | None = None
    problem: Problem | None = None


@dataclass
class Row:
    """One way to draft, with the figures of each window."""

    knob: str
    sampler: Sampler
    draft: str
    block_size: int | None
    verify: str
    nodes: int | None = None
    lossy: str = ""
    calls: list[float] = field(default_factory=list)
    perplexity: list[float] = field(default_factory=list)
    entropy: list[float] = field(default_factory=list)
    seconds: float = 0.0
    rouge: list[tuple[float, ...]] = field(default_factory=list)
    passed: list[bool] = field(default_factory=list)
    passes: int = 0  # of a batch, however many of its requests take part
    network_s: float = 0.0


def run(argv: list[str]) -> None:
    """Run the command with its arguments `key=value`."""
    quiet()
    bench = parse(argv, InfillBench, "decoding.bench.infill")
    with results(results_folder(bench, "bench")) as out:
        report(bench, measure(bench), out)


def measure(bench: InfillBench) -> list[Row]:
    """Fill every window in every way, batch by batch, the ways in turn.

    Args:
        bench: The command's options.

    Returns:
        A `Row` for each way.

    Raises:
        ValueError: The model does not fill holes, or the source has no such texts.
    """
    first = load(bench.model, sampler=bench.sampler, **bench.placing)
    if first.continues:
        raise ValueError(f"{bench.model} does not fill holes: python -m decoding.bench serves it")
    judge = None
    if bench.judge is not None:
        judge = causal.load(bench.judge, **bench.placing), load_tokenizer(bench.judge)
    todo = tasks(bench, first.tokenizer)
    rows = [row for knob in bench.knobs or ("",) for row in ways(bench, first, knob)]
    steps = [(t, at) for t in range(bench.trials) for at in range(0, len(todo), bench.batch_size)]
    for trial, start in track(steps, "infill bench"):
        batch = todo[start : start + bench.batch_size]
        for i, row in enumerate(rows):
            # Each way draws independently: a t-test compares independent samples.
            seed = bench.seed + start + (trial * len(rows) + i) * bench.samples
            for task, result in zip(batch, fill(row, [t.prompt for t in batch], seed, bench)):
                row.calls.append(result.stats.target_passes)
                rate(row, task, result, bench, judge)
    return rows


def fill(row: Row, prompts: list, seed: int, bench: InfillBench) -> list[Result]:
    """Fill a batch in one way, and count its seconds and passes."""
    params = SamplingParams(
        temperature=bench.temperature,
        verify=row.verify,
        draft=row.draft,
        block_size=row.block_size,
        lossy=bench.lossy,
        seed=seed,
    )
    started = perf_counter()
    results = row.sampler.generate(prompts, params)
    row.seconds += perf_counter() - started
    row.lossy = results[0].stats.lossy
    row.passes += max(r.stats.target_passes for r in results)
    row.network_s += max(r.stats.target_s for r in results)
    return results


def rate(row: Row, task: Task, result: Result, bench: InfillBench, judge: tuple | None) -> None:
    """Add what is measured of one filled text to its row.

    Args:
        row: The way that filled it.
        task: What was to be filled.
        result: The filled text.
        bench: The command's options.
        judge: A causal LM and its tokenizer, or None.
    """
    if judge is not None:
        row.perplexity.append(generative_perplexity(*judge, result.text))
        row.entropy.append(entropy(judge[1](result.text)["input_ids"]))
    if task.hidden is not None:
        row.rouge.append(rouge(row.sampler.tokenizer.decode(result.token_ids), task.hidden))
    if task.problem is not None and bench.execute:
        filled = filling(task.problem, result, row.sampler.tokenizer)
        row.passed.append(execute(program(task.problem, filled), bench.limits).outcome == "passed")


def tasks(bench: InfillBench, tokenizer: PreTrainedTokenizerBase) -> list[Task]:
    """The texts with holes of a bench: problems of infilling, or held-out windows.

    Raises:
        ValueError: The source has fewer, programs cannot be run here, or there are none to run.
    """
    if problems := infilling_problems(bench):
        return problem_tasks(bench, problems, tokenizer)
    if bench.execute:
        raise ValueError(
            f"execute=true, but source={bench.source!r} has no problems of infilling: give a file "
            "with 'task_id', 'prompt', 'suffix', 'canonical_solution', 'test', 'entry_point'"
        )
    where = {"split": bench.split, "subset": bench.subset, "limit": bench.limit}
    if bench.packed:
        windows = packed_windows(bench.source, tokenizer, bench.samples, bench.length, **where)
    else:
        given = bench.source, tokenizer, bench.samples, bench.length
        windows = [w["prompt_ids"] for w in heldout_prompts(*given, **where, chat=False)]
    found = []
    for ids, prompt in zip(windows, hide(bench, windows, tokenizer)):
        there = tokenizer.decode([t for t, p in zip(ids, prompt) if p is None])
        found.append(Task(prompt, None if bench.hide == "random" else there))
    return found


def infilling_problems(bench: InfillBench) -> list[Problem]:
    """The problems of infilling of a bench's source; none where it is another."""
    if not is_benchmark(bench.source):
        return []
    problems = read_benchmark(bench.source, subset=bench.subset)
    return [problem for problem in problems if problem.suffix is not None]


def problem_tasks(
    bench: InfillBench, problems: list[Problem], tokenizer: PreTrainedTokenizerBase
) -> list[Task]:
    """Problems of infilling, each with a hole of as many tokens as its solution has."""
    if len(problems) < bench.samples:
        raise ValueError(
            f"source={bench.source!r} has {len(problems)} problems, but samples={bench.samples}: "
            "lower it"
        )
    if bench.execute:
        check(bench.limits)
    else:
        print(f"no pass@1 in the table: {UNASKED}")
    found = []
    for problem in problems[: bench.samples]:
        size = len(tokenizer(problem.reference, add_special_tokens=False)["input_ids"])
        prompt = f"{problem.turns[0]}<hole:{max(1, size)}>{problem.suffix}"
        found.append(Task(prompt, problem.reference, problem))
    return found


def filling(problem: Problem, result: Result, tokenizer: PreTrainedTokenizerBase) -> str:
    """The text that was filled in, with its spaces where the whole text keeps what was given."""
    before, after, text = problem.turns[0], problem.suffix, result.text
    if text.startswith(before) and text.endswith(after) and len(text) >= len(before) + len(after):
        return text[len(before) : len(text) - len(after)]
    return tokenizer.decode(result.token_ids)


def ways(bench: InfillBench, first: Sampler, knob: str) -> list[Row]:
    """The ways to draft of the export's sampler with one knob changed ('': none)."""
    config = sampling_config(bench.model, [*bench.sampler, *([knob] if knob else [])])
    sampler = sampler_of(config, first.target, first.tokenizer)
    plain, *others = sampler.drafts
    for name in bench.drafts:
        if name not in sampler.drafts:
            raise unknown("draft", name, sampler.drafts)
    if bench.drafts:
        others = [name for name in others if name in bench.drafts]
    rows = [Row(knob, sampler, plain, None, bench.verify)]
    rows += [Row(knob, sampler, d, k, bench.verify) for d in others for k in bench.block_sizes]
    for nodes in bench.nodes:
        trees = sampler_of({**config, "nodes": nodes}, first.target, first.tokenizer)
        rows += [Row(knob, trees, "assd_fused", k, "tree", nodes) for k in bench.block_sizes]
    return rows


def hide(
    bench: InfillBench, windows: list[list[int]], tokenizer: PreTrainedTokenizerBase
) -> list[list[int | None]]:
    """Windows with a share of their tokens hidden.

    Args:
        bench: Its `hide`, `hidden` and, for random positions, `seed` are used.
        windows: Token ids.
        tokenizer: Of the ids; it finds the lines.

    Returns:
        The windows with None at the hidden positions.
    """
    generator = torch.Generator().manual_seed(bench.seed)
    hidden = []
    for ids in windows:
        if bench.hide == "lines":  # a token belongs to the line that it begins in
            line = [tokenizer.decode(ids[:n]).count("\n") for n in range(len(ids))]
            lines = middle(line[-1] + 1, bench.hidden)
            positions = {n for n in range(len(ids)) if line[n] in lines}
        elif bench.hide == "middle":
            positions = {*middle(len(ids), bench.hidden)}
        elif bench.hide == "suffix":
            positions = {*range(len(ids) - len(middle(len(ids), bench.hidden)), len(ids))}
        else:
            order = torch.randperm(len(ids), generator=generator).tolist()
            positions = {*order[: len(middle(len(ids), bench.hidden))]}
        hidden.append([None if n in positions else t for n, t in enumerate(ids)])
    return hidden


def middle(count: int, share: float) -> range:
    """The middle share of `count` things, at least one.

    >>> middle(5, 0.6)
    range(1, 4)
    """
    inside = max(1, round(share * count))
    first = (count - inside) // 2
    return range(first, first + inside)


def rouge(text: str, reference: str) -> tuple[float, ...]:
    """F-measures of ROUGE-1, ROUGE-2 and ROUGE-L in percent, of lower-cased words and digits.

    >>> rouge("x = one", "x = two")
    (50.0, 0.0, 50.0)
    """
    from torchmetrics.functional.text import rouge_score

    scores = rouge_score(text, reference, rouge_keys=ROUGE)
    return tuple(100 * scores[f"{name}_fmeasure"].item() for name in ROUGE)


def summary(row: Row, plain: Row) -> dict:
    """A row of the table, by column; ratios and p-values are against sequential decoding."""
    from scipy.stats import ttest_ind

    line = {"knob": row.knob} if row.knob else {}
    line["draft"] = f"{row.draft} (lossy: {row.lossy})" if row.lossy else row.draft
    if row.nodes:
        line["draft"] += f", trees of {row.nodes}"
    line["k"] = row.block_size or ""
    line["calls"] = spread(row.calls)
    ratio = fmean(row.calls) / fmean(plain.calls)
    line["calls / sequential"] = round(ratio, 3)
    # Both are of the same windows: the error of a ratio of means, by its residuals.
    rest = [ours - ratio * theirs for ours, theirs in zip(row.calls, plain.calls)]
    line["calls / sequential ±"] = round(error(rest) / fmean(plain.calls), 3)
    line["speed-up"] = round(plain.seconds / row.seconds, 2)
    line["ms a pass"] = round(1000 * row.network_s / row.passes, 2)
    for name in ("perplexity", "entropy"):
        here, there = getattr(row, name), getattr(plain, name)
        if not here:
            continue
        line[name] = spread(here)
        p = ttest_ind(here, there, equal_var=False).pvalue
        line[f"p ({name})"] = "" if row is plain else round(float(p), 2)
    for name, values in zip(ROUGE, zip(*row.rouge)):
        line[name.replace("rouge", "ROUGE-")] = spread(values)
    if row.passed:
        line["pass@1, %"] = spread([100.0 * right for right in row.passed])
    return line


def spread(values: list[float]) -> str:
    """The mean and its standard error, as text."""
    return f"{fmean(values):.2f} ± {error(values):.2f}"


def error(values: list[float]) -> float:
    """The standard error of a mean; 0 of one value."""
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def report(bench: InfillBench, rows: list[Row], out: Path) -> None:
    """Print the table, and write infill.csv and the command."""
    what = f"{bench.length} tokens, {bench.hidden:.0%} hidden ({bench.hide})"
    title = f"{bench.samples} windows of {what}, batch {bench.batch_size}, {bench.dtype}"
    if infilling_problems(bench):
        name = Path(bench.source).name
        title = f"{bench.samples} problems of {name}, batch {bench.batch_size}, {bench.dtype}"
    plain = {row.knob: row for row in rows if row.block_size is None}
    lines = [summary(row, plain[row.knob]) for row in rows]
    write_table(lines, out / "infill.csv", title, "decoding.bench.infill")
    best = min(lines, key=lambda line: line["calls / sequential"])
    print(
        f"fewest calls: {best['draft']}, k = {best['k']}: {best['calls / sequential']} "
        f"± {best['calls / sequential ±']} of the sequential calls"
    )
    print("calls: network passes a window; p: Welch's t-test against sequential decoding")
    print("ms a pass: the network's time for a batch, the pass that brings the prompt included")


if __name__ == "__main__":
    main(run)
