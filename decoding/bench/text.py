"""`python -m decoding.bench model=runs/deer_stage2/export`: samplers side by side, one run.

After a warm-up every prompt goes through every sampler in turn (interleaved, so that a slow minute
of the machine hits them all). In a batch the next prompt takes the place of one that has ended.
Where the prompts are a benchmark's with scores, the table has each sampler's score beside its speed
(`decoding/bench/scores.py`). `decoding/bench/text_report.py` lists the files that are written.
"""

from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import ClassVar

from data.text.prompts import heldout_prompts
from decoding.bench.baselines import HuggingFace
from decoding.bench.options import PromptBenchOptions, ScoreOptions, results_folder, told_apart
from decoding.bench.scores import scorer
from decoding.bench.text_report import Row, profile, report
from decoding.commands.cli import main, parse, quiet
from decoding.commands.options import check_batch_sizes, option
from decoding.commands.progress import track
from decoding.commands.report import results
from decoding.engine.params import KEYED, VERIFY, SamplingParams
from decoding.engine.sampler import Sampler
from decoding.loading import (
    check_one_tokenizer,
    for_inference,
    load,
    load_tokenizer,
    parade_config,
    sampling_config,
    target_of,
)
from decoding.samplers.plain import PlainSampler
from models import causal


@dataclass(frozen=True, kw_only=True)
class Bench(PromptBenchOptions, ScoreOptions):
    """Compare an export's sampler with plain decoding and with what transformers offers.

    An export in `also` that decodes with weights of its own (an earlier stage, say) is compared
    with plain decoding of those.
    """

    EXAMPLE: ClassVar[str] = "model=runs/deer_stage2/export temperatures=[0,1] batch_sizes=[1,4]"

    target: str | None = option(None, "a target instead of the one that the export names")
    assistant: str | None = option(
        None, "a drafter for transformers' assisted generation (recipe=ar_drafter)"
    )
    generate: bool = option(True, "transformers' own plain decoding too")
    prompt_lookup: int = option(
        10, "tokens that transformers drafts from the text itself; 0: leave it out", least=0
    )
    batch_sizes: tuple[int, ...] = option((1,), "prompts that are decoded together")
    verify: tuple[str, ...] = option(
        ("coupled", "rejection", "block", "tree"),
        "how drafts are verified; those that a sampler has are rows",
        choices=VERIFY,
    )
    block_size: int | None = option(None, "tokens drafted a cycle; null: the export's own", least=1)
    profile: bool = option(False, "show where a cycle's time goes, and a pass's cost by its width")

    def __post_init__(self):
        super().__post_init__()
        check_batch_sizes(self.batch_sizes, self.prompts)


def run(argv: list[str]) -> None:
    """Run the command with its arguments `key=value`."""
    quiet()
    bench = parse(argv, Bench, "decoding.bench")
    score = scorer(bench)  # a mistake in it must not cost hours
    with results(results_folder(bench, "bench")) as out:
        rows, prompts = measure(bench)
        if score is not None:
            for row in track(rows, score.metric):
                row.metric, row.scores = score.metric, score(row, prompts)
        title = f"{bench.prompts} prompts of {Path(bench.source).name}, {bench.dtype}"
        report(out, rows, prompts, title, bench.seed)
        if bench.profile:
            profile(rows, out)


def measure(bench: Bench) -> tuple[list[Row], list[dict]]:
    """Decode every prompt with every sampler.

    Args:
        bench: The command's options.

    Returns:
        A `Row` for each sampler, temperature and batch size; and the prompts.

    Raises:
        ValueError: A model does not decode token by token, or tokenizers differ.
    """
    options = {"target": bench.target, "sampler": bench.sampler}
    options |= bench.placing | {"trust_remote_code": bench.trust_remote_code}
    samplers = {name: load(name, **options) for name in (bench.model, *bench.also)}
    for name, sampler in samplers.items():
        if sampler.bench != "decoding.bench":
            raise ValueError(
                f"{name} does not decode token by token, so this bench cannot compare it: "
                f"python -m {sampler.bench} model={name}"
            )
    tokenizers = {name: s.tokenizer for name, s in samplers.items()}
    assistant = None
    if bench.assistant is not None:
        tokenizers[bench.assistant] = load_tokenizer(bench.assistant)
        first = samplers[bench.model].device  # beside its target, whole
        assistant = causal.load(bench.assistant, dtype=bench.dtype, device=first)
        for_inference(assistant)  # as the samplers' networks are
    check_one_tokenizer(tokenizers)
    tokenizer = samplers[bench.model].tokenizer
    prompts = heldout_prompts(tokenizer=tokenizer, **bench.prompt_set)
    ids = [p["prompt_ids"] for p in prompts]
    stock = _transformers(bench, samplers[bench.model], assistant)
    groups = [
        _rows(bench, samplers, stock, t, size)
        for t in bench.temperatures
        for size in bench.batch_sizes
    ]
    every = [row for rows in groups for row in rows]
    for row in every:  # warm-up: allocations, kernels' first calls
        row.sampler.generate(ids[: row.batch], row.params, seeds=[*range(row.batch)])
    # In the order of the prompts: a slow minute of the machine hits all temperatures and batches.
    steps = [(start, rows) for rows in groups for start in range(0, len(ids), rows[0].turn)]
    for start, rows in track(sorted(steps, key=lambda step: step[0]), "bench"):
        for row in rows:
            turn = ids[start : start + row.turn]
            given = {"seeds": [bench.seed + start + b for b in range(len(turn))]}
            started = perf_counter()
            row.results += row.sampler.generate(turn, row.params, **given, at_once=row.batch)
            row.seconds.append(perf_counter() - started)
    return every, prompts


def _transformers(bench: Bench, sampler: Sampler, assistant) -> dict[str, HuggingFace]:
    """The ways of transformers to generate, by name."""
    ways = {}
    if bench.generate:
        ways["transformers generate"] = HuggingFace(sampler)
    if assistant is not None:
        ways["transformers assisted"] = HuggingFace(sampler, assistant_model=assistant)
    if bench.prompt_lookup:
        lookup = {"prompt_lookup_num_tokens": bench.prompt_lookup}
        ways["transformers prompt lookup"] = HuggingFace(sampler, **lookup)
    return ways


def _rows(
    bench: Bench,
    samplers: dict[str, Sampler],
    stock: dict[str, HuggingFace],
    temperature: float,
    batch: int,
) -> list[Row]:
    def params(verify: str) -> SamplingParams:
        return SamplingParams(
            max_new_tokens=bench.max_new_tokens,
            temperature=temperature,
            ignore_eos=bench.ignore_eos,
            verify=verify,
            block_size=bench.block_size,
        )

    rows, plain, names = [], {}, told_apart(samplers)
    for path, sampler in samplers.items():
        other = "" if path == bench.model else f" ({names[path]})"
        config = parade_config(path)
        target = target_of(path, config, bench.target) or path
        if target not in plain:
            own = PlainSampler(sampler.target, sampler.tokenizer)
            plain[target] = Row(f"plain{other}", own, params("coupled"), batch, "same text")
            rows.append(plain[target])
        if path == bench.model:
            guarantee = "same distribution" if temperature else "same text"
            for name, way in stock.items():
                if batch == 1 or not way.arguments:  # transformers drafts for one request only
                    rows.append(Row(name, way, params("coupled"), batch, guarantee, plain[target]))
        name = sampling_config(path, bench.sampler)["method"] + other
        rules = ("coupled",) if isinstance(sampler, PlainSampler) else sampler.rules
        for rule in rules:
            # At temperature 0 the others are `coupled`.
            if rule not in bench.verify or not (temperature or rule in KEYED):
                continue
            label = f"{name}, {rule}" if temperature or rule == "tree" else name
            guarantee = "same text" if rule in KEYED else "same distribution"
            rows.append(Row(label, sampler, params(rule), batch, guarantee, plain[target]))
    return rows


if __name__ == "__main__":
    main(run)
