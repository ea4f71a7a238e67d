"""`python -m decoding.calibrate model=runs/deer_stage2/export`: the fastest drafts on this machine.

The sharpness of the drafter's distributions at each depth of a tree is fitted to the tokens that
the target chose (`decoding.calibration.tree_ranking`), and with `answers=` also the weight of
bigram scores counted in teacher answers (`decoding.drafting.bigrams`). A tree of more nodes has
more accepted drafts and needs a wider pass; the best size depends on drafter, target and machine,
so it is measured on held-out prompts. The fastest knobs are written into the export for
`verify=tree`, and so is the fastest length at each temperature of drafts that are no tree. A tree
has only nodes that bring more tokens than are decoded in the time that one more takes (`limits`).
What is fastest, a tree, a chain or plain decoding, is what a request of `verify=coupled` gets.
"""

import json
from dataclasses import dataclass
from itertools import cycle, islice, product
from pathlib import Path
from statistics import linear_regression
from time import perf_counter
from typing import Any, ClassVar, NamedTuple

from data.arguments import Count, Several, Small, Temperature, Tokens
from data.files import atomic_write
from decoding.drafting.tree_limits import check_tree
from decoding.engine.params import SamplingParams
from decoding.report import counted, results, write_table
from recipes.command import main
from recipes.options import NEEDED, PromptOptions, check_first, option, parse
from terminal.progress import Work, track

TIMED, FITTED = 8, 24  # prompts
PARTS = {"target ms": "target_s", "drafter ms": "drafter_s"}  # of a cycle and a request


@dataclass(frozen=True, kw_only=True)
class Calibrate(PromptOptions):
    """Decode held-out prompts one by one with trees of several shapes and drafts of other lengths.

    The fastest over all temperatures goes into the export: its config.json is written.
    """

    EXAMPLE: ClassVar[str] = "model=runs/deer_stage2/export answers=runs/deer_answers nodes=[8,16]"

    model: str = option(NEEDED, "the folder of an export that drafts")
    answers: str | None = option(None, "a collection of teacher answers, whose bigrams are tried")
    target: str | None = option(None, "a target instead of the one that the export names")
    prompts: Count | None = option(
        None, "held-out ones that are timed; null: 8, or a third of a file of yours with fewer"
    )
    fit_prompts: Count | None = option(
        None, "others, to which the sharpness is fitted; null: 24, or the rest of such a file"
    )
    max_new_tokens: Tokens = option(64, "tokens of an answer, at the most")
    temperatures: Several[Temperature] = option(
        (0.0, 1.0), "of the fits; the fastest over all is kept"
    )
    nodes: Several[Small] = option((8, 12, 16, 24, 32, 48), "of a tree, to try")
    sharpness: Several[float] = option(
        (0.8, 1.0, 1.25), "factors of each depth's fitted sharpness, to try"
    )
    lengths: tuple[Count, ...] = option((2, 3, 4, 6), "of drafts that are no tree, to try too")
    batch_sizes: Several[Count] = option(
        (1,), "prompts together: nodes and lengths are found for each, the rest for the first"
    )

    def __post_init__(self):
        super().__post_init__()
        for nodes, sharpness in product(self.nodes, self.sharpness):
            check_tree(nodes, sharpness)

    def check_inputs(self) -> None:
        if not self.file.is_file():
            raise ValueError(
                f"model={self.model!r} is no folder of an export: there is no {self.file}"
            )

    @property
    def file(self) -> Path:
        """Return the export's config.json."""
        return Path(self.model) / "config.json"


def read_options(argv: list[str]) -> Calibrate:
    """Return the command's options."""
    return parse(argv, Calibrate, "decoding.calibrate")


check_first(__name__, read_options)

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from data.corpora.answers import read_answers
from data.text.prompts import heldout_prompts
from data.text.tokenizer import checked_manifest
from decoding.calibration.tree_ranking import fit, observed
from decoding.drafting.bigrams import FILE, Bigrams, count, write
from decoding.drafting.block_sampler import BlockSampler
from decoding.engine.sampler import Sampler
from decoding.loading import entry_of, load, parade_config, read_config, sampler_of
from decoding.samplers.plain import PlainSampler

Rates = dict[str, dict[str, float]]  # tokens/s by batch size and temperature


def run(argv: list[str]) -> None:
    """Run the command with its arguments `key=value`."""
    c = read_options(argv)
    c.check_inputs()
    file = c.file
    # Bigrams of an earlier calibration are not needed, and a damaged table must be replaceable.
    bare = ["bigrams=false"] if "bigrams" in parade_config(c.model) else []
    sampler = load(c.model, target=c.target, sampler=bare, **c.placing)
    if not isinstance(sampler, BlockSampler) or not sampler.fits_machine:
        raise ValueError(
            f"{c.model} has no drafter that drafts trees: there is nothing to calibrate"
        )
    prompts = chosen_prompts(c, sampler.tokenizer)
    table = None
    if c.answers is not None:
        checked_manifest(c.answers, sampler.tokenizer)
        answers = track(read_answers(c.answers, "train"), "bigrams", unit="answers")
        texts = (answer.ids for answer in answers)
        table = count(texts, sampler.vocabulary)
    out = Path(c.out) if c.out else file.parents[1] / "calibration"
    with results(out) as written:
        lengths, given, rates = fastest_lengths(c, sampler, prompts.timed, written)
        knobs: dict = {"lengths": lengths}
        if "tree" in sampler.rules:  # a target with recurrent layers takes chains alone
            tree, found = fastest_tree(c, sampler, prompts, table, given, written)
            knobs, rates = tree | knobs, {"tree": found, **rates}
        knobs["fastest"] = {
            batch: {t: max(rates, key=lambda way: rates[way][batch][t]) for t in best}
            for batch, best in lengths.items()
        }
        keep(file, knobs, table)  # before the tables are there, which say that it is done
    print("; ".join(f"{name}={knob}" for name, knob in knobs.items()) + f" are now in {file}")


class Prompts(NamedTuple):
    """The token ids of the prompts that are timed, and of those that knobs are fitted to."""

    timed: list[list[int]]
    fitted: list[list[int]]


def chosen_prompts(c: Calibrate, tokenizer: PreTrainedTokenizerBase) -> Prompts:
    """Return the prompts; a file or folder of the user may have fewer than the defaults."""
    timed, fitted = c.prompts or TIMED, c.fit_prompts or FITTED
    which = c.prompt_set | {"count": timed + fitted, "fewer": not (c.prompts or c.fit_prompts)}
    found = [p["prompt_ids"] for p in heldout_prompts(tokenizer=tokenizer, **which)]
    if len(found) < 2:
        raise ValueError(f"source={c.source!r} has one held-out prompt: give one with two or more")
    if len(found) < timed + fitted:
        timed = max(1, len(found) // 3)
    return Prompts(found[:timed], found[timed:])


def fastest_tree(
    c: Calibrate,
    sampler: BlockSampler,
    prompts: Prompts,
    table: Bigrams | None,
    given: dict,
    out: Path,
) -> tuple[dict, Rates]:
    """Find the trees that are fastest over all temperatures; write calibration.csv into `out`.

    `given` are knobs of all trees. Returns {"nodes": {batch size: nodes}, "sharpness": ...,
    "bigrams": ...}, as an export keeps them, and the trees' rates.
    """
    seen = {
        t: observed(sampler, prompts.fitted, params_of(c, t, verify="tree"))
        for t in track(c.temperatures, "answers to fit to", unit="temperatures")
    }
    with Work("fit of the trees"):
        tables = [None, table] if table else [None]
        shapes = {of: given | x for t in tables for of, x in shapes_of(c, seen, t).items()}
    parts = {"draft_ids": sampler.draft_ids}
    if sampler.markov is not None:
        parts["markov"] = sampler.markov.head
    entry, target, drafter = parade_config(c.model), sampler.target, sampler.drafter
    ways: dict = {}
    for shape, knobs in shapes.items():
        weights = knobs["bigrams"]
        scores = {"bigrams": table, "bigram_weights": weights} if weights else {}
        way = sampler_of({**entry, **knobs}, target, sampler.tokenizer, drafter, **parts, **scores)
        ways[shape] = way, {"verify": "tree"}
    names = ("bigrams", "nodes", "sharpness")
    lines, nodes = [], {}
    rates: Rates = {}
    for batch in c.batch_sizes:
        figures = measure(c, ways, prompts.timed, batch)
        lines += [{"batch": batch, **dict(zip(names, of)), **figures[of]} for of in ways]
        best = max(ways, key=lambda of: figures[of]["tokens/s"])
        nodes[str(batch)] = best[1]
        rates[str(batch)] = rates_of(c, figures[best])
        # For other batches only the number of nodes is open.
        ways = {of: way for of, way in ways.items() if (of[0], of[2]) == (best[0], best[2])}
    title = title_of(c, prompts.timed)
    write_table(lines, out / "calibration.csv", title, "decoding.calibrate")
    return {**shapes[best], "nodes": nodes}, rates


def rates_of(c: Calibrate, figures: dict[str, float]) -> dict[str, float]:
    """Return the tokens/s at each temperature."""
    return {f"{t:g}": figures[f"tokens/s, T={t:g}"] for t in c.temperatures}


def fastest_lengths(
    c: Calibrate, sampler: BlockSampler, prompts: list[list[int]], out: Path
) -> tuple[dict[str, dict[str, int]], dict[str, dict[str, float]], dict[str, Rates]]:
    """Find the fastest lengths of drafts that are no tree, {batch size: {temperature: tokens}}.

    Also return the limits of trees (`limits`) by batch size, and the rates of 'chain', drafts of
    these lengths, and 'plain', none.
    """
    tried = sorted({*c.lengths, sampler.block_size})
    lines, lengths = [], {}
    given: dict[str, dict[str, float]] = {}
    plain = PlainSampler(sampler.target, sampler.tokenizer)
    found: dict[str, Rates] = {"chain": {}, "plain": {}}
    for batch in c.batch_sizes:
        # Above the smallest batch size only keyed drafts use a calibrated length.
        rule = "block" if batch == min(c.batch_sizes) else "coupled"
        ways: dict = {k: (sampler, {"verify": rule, "block_size": k}) for k in tried}
        figures = measure(c, {0: (plain, {"verify": rule}), **ways}, prompts, batch)
        lines += [{"batch": batch, "drafted": k, **figures[k]} for k in figures]
        found["plain"][str(batch)] = rates_of(c, figures.pop(0))
        rates = {k: rates_of(c, figures[k]) for k in tried}
        best = {t: max(tried, key=lambda k: rates[k][t]) for t in rates[tried[0]]}
        lengths[str(batch)] = best
        found["chain"][str(batch)] = {t: rates[k][t] for t, k in best.items()}
        for name, limit in limits(figures, sampler.tail).items():
            given.setdefault(name, {})[str(batch)] = limit
    write_table(lines, out / "lengths.csv", title_of(c, prompts), "decoding.calibrate")
    return lengths, given, found


def title_of(c: Calibrate, prompts: list[list[int]]) -> str:
    """Return the title of a table."""
    return f"{counted(len(prompts), 'held-out prompt')}, {c.dtype}"


def limits(figures: dict[int, dict[str, float]], tail: bool) -> dict[str, float]:
    """Return the least probability of a tree's node, and the least gain of a run of a `tail`.

    Each is the tokens that the fastest drafts emit in the time that one more token takes: in the
    target's pass, or in the drafter's.

    Args:
        figures: Those of `measure`, by the tokens that a cycle drafts.

    >>> two = {"target ms": 10.0, "drafter ms": 2.0, "tokens/s": 100.0}
    >>> four = {"target ms": 11.0, "drafter ms": 6.0, "tokens/s": 90.0}
    >>> limits({2: two, 4: four}, tail=True)
    {'least': 0.05, 'least_gain': 0.2}
    """
    fastest = max(line["tokens/s"] for line in figures.values()) / 1000
    found = {}
    for name, part in zip(("least", "least_gain") if tail else ("least",), PARTS):
        times = [line[part] for line in figures.values()]
        slope = linear_regression([*figures], times).slope if len(times) > 1 else 0.0
        found[name] = round(max(slope, 0.0) * fastest, 4)
    return found


def shapes_of(
    c: Calibrate, seen: dict[float, tuple[Tensor, Tensor]], table: Bigrams | None
) -> dict[tuple[bool, int, float], dict]:
    """Return the knobs of trees to try by (with bigrams, nodes, factor on the sharpness)."""
    fitted = {f"{t:g}": fit(*pair, table) for t, pair in seen.items()}
    bigram_weights = {t: weights for t, (_, weights) in fitted.items()}
    shapes = {}
    for nodes, factor in product(c.nodes, c.sharpness):
        sharpness = {t: [round(factor * s, 2) for s in depths] for t, (depths, _) in fitted.items()}
        shapes[table is not None, nodes, factor] = {
            "nodes": nodes, "sharpness": sharpness, "bigrams": bigram_weights if table else False,
        }  # fmt: skip
    return shapes


def params_of(c: Calibrate, temperature: float, **options) -> SamplingParams:
    """Return the sampling parameters of a measured request."""
    options |= {"ignore_eos": c.ignore_eos, "seed": c.seed}
    return SamplingParams(c.max_new_tokens, temperature, **options)


def measure(
    c: Calibrate, ways: dict[Any, tuple[Sampler, dict]], prompts: list[list[int]], batch: int
) -> dict[Any, dict]:
    """Measure acceptance lengths and tokens/s of each way to decode, by name.

    A way is a sampler and options of `SamplingParams`. Every batch goes through all ways in turn,
    so a slow minute of the machine affects all of them. The first prompts fill the last batch.
    """
    count = -(-len(prompts) // batch)
    filled = [*islice(cycle(prompts), count * batch)]
    batches = [filled[i * batch : (i + 1) * batch] for i in range(count)]
    emitted: dict[tuple, list[int]] = {(name, t): [] for name in ways for t in c.temperatures}
    seconds = dict.fromkeys(emitted, 0.0)
    spent = {of: dict.fromkeys(ways, 0.0) for of in PARTS}
    turns = [*product([None, *batches], ways.items(), c.temperatures)]
    for rows, (name, (sampler, options)), t in track(
        turns, f"calibrate, batch {batch}", unit="turns"
    ):
        started = perf_counter()
        results = sampler.generate(rows or batches[0], params_of(c, t, **options))
        if rows is not None:  # else it was the warm-up
            seconds[name, t] += perf_counter() - started
            emitted[name, t] += [n for result in results for n in result.stats.emitted]
            for part, attribute in PARTS.items():  # of the whole batch, until the last one ended
                spent[part][name] += max(getattr(result.stats, attribute) for result in results)
    figures = {}
    for name in ways:
        found = {t: emitted[name, t] for t in c.temperatures}
        lengths = {f"acceptance length, T={t:g}": sum(n) / len(n) for t, n in found.items()}
        rates = {f"tokens/s, T={t:g}": sum(n) / seconds[name, t] for t, n in found.items()}
        rate = sum(map(sum, found.values())) / sum(seconds[name, t] for t in c.temperatures)
        cycles = sum(map(len, found.values()))
        parts = {of: 1000 * spent[of][name] / cycles for of in spent}
        line = {**lengths, **rates, "tokens/s": rate, **parts}
        figures[name] = {
            key: round(x, 1 if key.startswith("tokens") else 2) for key, x in line.items()
        }
    return figures


def keep(config: Path, knobs: dict, table: Bigrams | None) -> None:
    """Write knobs and bigrams into a config.json's `parade` entry and next to it, atomically.

    Without bigrams in `knobs` the table of an earlier calibration is removed.
    """
    if knobs.get("bigrams") and table is not None:
        write(table, config.parent)
    entry = read_config(config)
    entry["parade"] = entry_of(entry, config) | knobs  # a published drafter has none yet
    with atomic_write(config) as temporary:
        temporary.write_text(json.dumps(entry, indent=2) + "\n")
    if not knobs.get("bigrams"):
        (config.parent / FILE).unlink(missing_ok=True)


if __name__ == "__main__":
    main(run)
