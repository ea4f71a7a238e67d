"""`python -m decoding.bench.infill model=... judge=...`: ways to draft side by side.

Held-out windows with a share of their tokens hidden are filled by every way to draft. Fewer passes
must not change the distribution of the texts: a judge's perplexity and the entropy of each text are
compared with sequential decoding by Welch's t-test (arXiv 2504.20456, Tables 1 and 5 to 8, E.4). A
filled middle is also compared with the original text, by ROUGE (Table 3).
"""

import math
from collections import Counter
from dataclasses import dataclass, field
from statistics import fmean, stdev
from time import perf_counter
from typing import ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from data.text.prompts import heldout_prompts
from decoding.bench.options import results_folder
from decoding.commands.cli import main, parse, quiet
from decoding.commands.options import NEEDED, SourceOptions, option
from decoding.commands.progress import track
from decoding.commands.report import write_table
from decoding.engine.params import VERIFY, Result, SamplingParams
from decoding.engine.sampler import Sampler
from decoding.loading import load, load_tokenizer, sampler_of, sampling_config
from models import causal
from models.placement import input_device

HIDE = ("random", "middle", "lines")
ROUGE = ("rouge1", "rouge2", "rougeL")


@dataclass(frozen=True, kw_only=True)
class InfillBench(SourceOptions):
    """Fill held-out texts with every way to draft; calls, seconds, perplexity, entropy."""

    EXAMPLE: ClassVar[str] = "model=runs/asarm_joint/export judge=runs/ar_target/export hide=middle"

    judge: str = option(NEEDED, "a causal LM that rates the filled texts")
    samples: int = option(128, "windows of held-out text", least=1)
    length: int = option(256, "tokens of a window", least=1)
    hidden: float = option(0.95, "share of each window that is hidden")
    hide: str = option(
        "random", "tokens anywhere, tokens in the middle, or whole lines there", choices=HIDE
    )
    block_sizes: tuple[int, ...] = option((5,), "k of the ways that draft", least=1)
    nodes: tuple[int, ...] = option((), "sizes of the trees of assd_fused with verify=tree")
    knobs: tuple[str, ...] = option(
        (), "every way once with each, as [cache=true,cache=false] (Table 7)"
    )
    lossy: bool = option(False, "allow knobs that are not lossless, as tolerance=0.05 (Table 8)")
    batch_size: int = option(8, "windows that are filled together", least=1)
    temperature: float = option(1.0, "of the sampling; 0 is greedy", least=0)
    verify: str = option("rejection", "how drafts are verified", choices=VERIFY)


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
    passes: int = 0  # of a batch, however many of its requests take part
    network_s: float = 0.0


def run(argv: list[str]) -> None:
    """Run the command with its arguments `key=value`."""
    quiet()
    bench = parse(argv, InfillBench, "decoding.bench.infill")
    report(bench, measure(bench))


def measure(bench: InfillBench) -> list[Row]:
    """Fill every window in every way, batch by batch, the ways in turn.

    Args:
        bench: The command's options.

    Returns:
        A `Row` for each way.

    Raises:
        ValueError: The model does not fill holes.
    """
    first = load(bench.model, **bench.placing)
    if first.continues:
        raise ValueError(f"{bench.model} does not fill holes: python -m decoding.bench serves it")
    judge = causal.load(bench.judge, **bench.placing)
    judge_tokenizer = load_tokenizer(bench.judge)
    windows = [
        window["prompt_ids"]
        for window in heldout_prompts(
            bench.source, first.tokenizer, bench.samples, bench.length,
            split=bench.split, subset=bench.subset, limit=bench.limit, chat=False,
        )
    ]  # fmt: skip
    prompts = hide(bench, windows, first.tokenizer)
    rows = [row for knob in bench.knobs or ("",) for row in ways(bench, first, knob)]
    for start in track(range(0, len(prompts), bench.batch_size), "infill bench"):
        batch = prompts[start : start + bench.batch_size]
        for i, row in enumerate(rows):
            params = SamplingParams(
                temperature=bench.temperature,
                verify=row.verify,
                draft=row.draft,
                block_size=row.block_size,
                lossy=bench.lossy,
                # Each way draws independently: a t-test compares independent samples.
                seed=bench.seed + start + i * bench.samples,
            )
            started = perf_counter()
            results = row.sampler.generate(batch, params)
            row.seconds += perf_counter() - started
            row.lossy = results[0].stats.lossy
            row.passes += max(r.stats.target_passes for r in results)
            row.network_s += max(r.stats.target_s for r in results)
            for b, result in enumerate(results, start=start):
                row.calls.append(result.stats.target_passes)
                row.perplexity.append(perplexity(judge, judge_tokenizer, result))
                row.entropy.append(entropy(judge_tokenizer(result.text)["input_ids"]))
                if bench.hide != "random":
                    there = [t for t, p in zip(windows[b], prompts[b]) if p is None]
                    texts = map(first.tokenizer.decode, (result.token_ids, there))
                    row.rouge.append(rouge(*texts))
    return rows


def ways(bench: InfillBench, first: Sampler, knob: str) -> list[Row]:
    """The ways to draft of the export's sampler with one knob changed ('': none)."""
    config = sampling_config(bench.model, [knob] if knob else [])
    sampler = sampler_of(config, first.target, first.tokenizer)
    plain, *others = sampler.drafts
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


def perplexity(judge: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, result: Result) -> float:
    """Generative perplexity of a text under a judge, Eq. 21 over all tokens but the first."""
    ids = torch.tensor([tokenizer(result.text)["input_ids"]], device=input_device(judge))
    with torch.inference_mode():
        logits: Tensor = judge(ids).logits.float()
    loss = torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:])
    return math.exp(loss.item())


def entropy(ids: list[int]) -> float:
    """Shannon entropy of a text's token frequencies in bits, Eq. 22.

    >>> entropy([7, 8, 7, 8])
    1.0
    """
    shares = [count / len(ids) for count in Counter(ids).values()]
    return -sum(p * math.log2(p) for p in shares)


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
    line["calls / sequential"] = round(fmean(row.calls) / fmean(plain.calls), 3)
    line["speed-up"] = round(plain.seconds / row.seconds, 2)
    line["ms a pass"] = round(1000 * row.network_s / row.passes, 2)
    for name in ("perplexity", "entropy"):
        here, there = getattr(row, name), getattr(plain, name)
        line[name] = spread(here)
        p = ttest_ind(here, there, equal_var=False).pvalue
        line[f"p ({name})"] = "" if row is plain else round(float(p), 2)
    for name, values in zip(ROUGE, zip(*row.rouge)):
        line[name.replace("rouge", "ROUGE-")] = spread(values)
    return line


def spread(values: list[float]) -> str:
    """The mean and its standard error, as text."""
    error = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return f"{fmean(values):.2f} ± {error:.2f}"


def report(bench: InfillBench, rows: list[Row]) -> None:
    """Print the table, and write infill.csv and the command."""
    out = results_folder(bench, "bench")
    title = (
        f"{bench.samples} windows of {bench.length} tokens, {bench.hidden:.0%} hidden "
        f"({bench.hide}), "
        f"batch {bench.batch_size}, {bench.dtype}"
    )
    plain = {row.knob: row for row in rows if row.block_size is None}
    lines = [summary(row, plain[row.knob]) for row in rows]
    write_table(lines, out / "infill.csv", title, "decoding.bench.infill")
    print("calls: network passes a window; p: Welch's t-test against sequential decoding")
    print("ms a pass: the network's time for a batch, the pass that brings the prompt included")
    print(f"wrote {out / 'infill.csv'}")


if __name__ == "__main__":
    main(run)
