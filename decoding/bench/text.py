"""`python -m decoding.bench model=runs/deer_stage2/export`: samplers side by side, one run."""

from collections.abc import Sequence
from itertools import product
from pathlib import Path

from data.text.chat import start_ids
from data.text.prompts import heldout_prompts
from decoding.bench.baselines import HuggingFace
from decoding.bench.drawn_trees import drawing
from decoding.bench.options import (
    Bench,
    note_model,
    read_options,
    results_folder,
    told_apart,
)
from decoding.bench.rows import params_of, take_turns
from decoding.bench.scores import scorer
from decoding.bench.text_report import TextRow, report
from decoding.drafting.block_sampler import BlockSampler
from decoding.engine.params import KEYED
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
from decoding.report import counted, draws, results
from decoding.samplers.ngram import NgramSampler
from decoding.samplers.plain import PlainSampler
from models import causal
from recipes.command import main
from recipes.options import check_batch_sizes
from terminal.progress import track


def run(argv: list[str]) -> None:
    """Run the command with its arguments `key=value`."""
    bench = read_options(argv)
    score = scorer(bench)  # a mistake in it must not cost hours
    draws()  # said before them, too
    with results(results_folder(bench, "bench")) as out:
        note_model(bench, out)
        rows, prompts = measure(bench)
        if score is not None:
            for row in track(rows, score.metric):
                row.metric, row.scores = score.metric, score(row, prompts)
        title = f"{counted(len(prompts), 'prompt')} of {Path(bench.source).name}, {bench.dtype}"
        report(out, rows, prompts, title, bench.seed)


def measure(bench: Bench) -> tuple[list[TextRow], list[dict]]:
    """Decode every prompt with every sampler; return a `TextRow` per setting, and the prompts."""
    options: dict = {"target": bench.target, "sampler": bench.sampler}
    options |= bench.placing | {"trust_remote_code": bench.trust_remote_code}
    samplers = {name: load(name, **options) for name in (bench.model, *bench.also)}
    for name, sampler in samplers.items():
        if sampler.bench != "decoding.bench":
            raise ValueError(f"{name} has its own bench: python -m {sampler.bench} model={name}")
    tokenizers = {name: s.tokenizer for name, s in samplers.items()}
    first, assistant = samplers[bench.model], None
    if bench.assistant is not None:
        tokenizers[bench.assistant] = load_tokenizer(bench.assistant)
        # Beside its target, whole.
        assistant = causal.load(bench.assistant, dtype=bench.dtype, device=first.device)
        for_inference(assistant)  # as the samplers' networks are
    check_one_tokenizer(tokenizers)
    prompts = heldout_prompts(tokenizer=first.tokenizer, **bench.prompt_set)
    check_batch_sizes(bench.batch_sizes, len(prompts))  # which can be fewer than are asked for
    stock = _transformers(bench, first, assistant)
    whole = [p["prompt_ids"] for p in prompts]
    found: list[TextRow] = []
    # The longest first: what does not fit the model's context costs no hours.
    lengths: list[int | None] = [*sorted({*bench.prompt_lengths}, reverse=True)]
    for length in lengths or [None]:
        rows = []
        for temperature, size in product(bench.temperatures, bench.batch_sizes):
            rows += _rows(bench, samplers, stock, temperature, size)
        ids = whole if length is None else ends(whole, length, len(start_ids(first.tokenizer)))
        for row in rows:
            row.context, row.asked = length, ids
        named = "bench" if length is None else f"bench, {length} tokens of context"
        short = [prompt[: min(bench.prompt_lengths, default=None)] for prompt in ids]
        take_turns(rows, ids, bench.seed, named, first=short)
        found = rows + found
    return found, prompts


def ends(prompts: Sequence[list[int]], length: int, start: int = 0) -> list[list[int]]:
    """Return the last tokens of each prompt after its first `start` ones, `length` in all.

    >>> ends([[1, 5, 6, 7, 8]], 3, start=1)
    [[1, 7, 8]]
    """
    short = min(map(len, prompts))
    if short < length or length <= start:
        raise ValueError(
            f"prompt_lengths= has {length}, and a prompt has {short} tokens: give at least "
            f"{start + 1} and at most {short}, or a source of longer texts"
        )
    return [prompt[:start] + prompt[len(prompt) - length + start :] for prompt in prompts]


def _transformers(bench: Bench, sampler: Sampler, assistant) -> dict[str, HuggingFace]:
    """Return transformers' ways to generate, by name."""
    ways = {"transformers generate": HuggingFace(sampler)} if bench.generate else {}
    if assistant is not None:
        ways["transformers assisted"] = HuggingFace(sampler, assistant_model=assistant)
    if bench.prompt_lookup:
        lookup = HuggingFace(sampler, prompt_lookup_num_tokens=bench.prompt_lookup)
        ways["transformers prompt lookup"] = lookup
    return ways


def _rows(
    bench: Bench,
    samplers: dict[str, Sampler],
    stock: dict[str, HuggingFace],
    temperature: float,
    batch: int,
) -> list[TextRow]:
    """Return the rows of one temperature and batch size."""
    rows, plain, names = [], {}, told_apart(samplers)

    def add(name: str, way, of: TextRow | None, exact: bool = True, rule: str = "coupled"):
        shared = {"temperature": temperature, "block_size": bench.block_size}
        params = params_of(bench, **shared, verify=rule)
        way = way.fresh() if isinstance(way, Sampler) else way  # no row learns from another
        guarantee = "same text" if exact else "same distribution"
        rows.append(TextRow(name, way, params, batch, of, guarantee=guarantee))

    for path, sampler in samplers.items():
        other = "" if path == bench.model else f" ({names[path]})"
        target = target_of(path, parade_config(path), bench.target) or path
        if target not in plain:
            add(f"plain{other}", PlainSampler(sampler.target, sampler.tokenizer), None)
            plain[target] = rows[-1]
        if path == bench.model:
            for name, way in stock.items():
                if batch == 1 or not way.arguments:  # transformers drafts for one request only
                    add(name, way, plain[target], exact=not temperature)
        name = sampling_config(path, bench.sampler)["method"] + other
        if path == bench.model and bench.prompt_lookup and name != "ngram":
            ngrams = NgramSampler(sampler.target, sampler.tokenizer)
            rule = "tree" if "tree" in ngrams.rules else "coupled"
            add(f"ngram, {rule}", ngrams, plain[target], rule=rule)
        drafts = sampler.always_drafting() if isinstance(sampler, BlockSampler) else sampler
        rules = () if isinstance(sampler, PlainSampler) else sampler.rules  # it has its row
        for rule in rules:
            # At temperature 0 the others are `coupled`.
            if rule in bench.verify and (temperature or rule in KEYED):
                label = f"{name}, {rule}" if temperature or rule == "tree" else name
                add(label, drafts, plain[target], exact=rule in KEYED, rule=rule)
        if temperature and isinstance(drafts, BlockSampler):
            for rule in bench.drawn:
                drawn = drawing(drafts, rule)
                add(f"{name}, {rule}", drawn, plain[target], exact=False, rule="rejection")
    return rows


if __name__ == "__main__":
    main(run)
