"""`python -m decoding.calibrate model=runs/deer_stage2/export`: the fastest drafts on this machine.

The sharpness of the drafter's distributions at each depth of a tree is fitted to the tokens that
the target chose (`decoding.calibration.tree_ranking`), and with `answers=` the weight of bigram
scores counted in teacher answers (`decoding.drafting.bigrams`). A tree of more nodes has more
drafts accepted and needs a wider pass; the best number depends on drafter, target and machine, so
it is measured by decoding held-out prompts. The fastest knobs are written into the export, where
`verify=tree` reads them, and so is the fastest length, at each temperature, of drafts that are no
tree.
"""

import json
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Any, ClassVar

from torch import Tensor

from data.corpora.answers import read_answers
from data.files import atomic_write
from data.rows.documents import checked_manifest
from data.text.prompts import heldout_prompts
from decoding.calibration.tree_ranking import fit, observed
from decoding.commands.cli import main, parse, quiet
from decoding.commands.options import NEEDED, PromptOptions, check_batch_sizes, option
from decoding.commands.progress import track
from decoding.commands.report import results, write_table
from decoding.drafting.bigrams import FILE, Bigrams, count, write
from decoding.drafting.block_sampler import BlockSampler
from decoding.drafting.tree import check_tree
from decoding.engine.params import SamplingParams
from decoding.engine.sampler import Sampler
from decoding.entry import entry_of, read_config
from decoding.loading import load, parade_config, sampler_of


@dataclass(frozen=True, kw_only=True)
class Calibrate(PromptOptions):
    """Decode held-out prompts one by one with trees of several shapes and drafts of other lengths.

    The fastest over all temperatures goes into the export: its config.json is written.
    """

    EXAMPLE: ClassVar[str] = "model=runs/deer_stage2/export answers=runs/deer_answers nodes=[8,16]"

    model: str = option(NEEDED, "the folder of an export that drafts")
    answers: str | None = option(None, "a collection of teacher answers, whose bigrams are tried")
    target: str | None = option(None, "a target instead of the one that the export names")
    prompts: int = option(8, "held-out prompts that are timed", least=1)
    fit_prompts: int = option(24, "other prompts, to which the sharpness is fitted", least=1)
    max_new_tokens: int = option(64, "tokens of an answer, at the most", least=1)
    temperatures: tuple[float, ...] = option(
        (0.0, 1.0), "of the fits; the fastest over all of them is kept", least=0
    )
    nodes: tuple[int, ...] = option((8, 12, 16, 24, 32, 48), "of a tree, to try")
    sharpness: tuple[float, ...] = option(
        (0.8, 1.0, 1.25), "factors to try, times the fitted sharpness of each depth"
    )
    lengths: tuple[int, ...] = option(
        (2, 3, 4, 6), "of drafts that are no tree, to try beside the drafter's", least=1, empty=True
    )
    batch_sizes: tuple[int, ...] = option(
        (1,), "prompts together: nodes and lengths are found for each, the rest for the first"
    )

    def __post_init__(self):
        super().__post_init__()
        check_batch_sizes(self.batch_sizes, self.prompts)
        for nodes, sharpness in product(self.nodes, self.sharpness):
            check_tree(nodes, sharpness)


def run(argv: list[str]) -> None:
    """Run the command with its arguments `key=value`."""
    quiet()
    c = parse(argv, Calibrate, "decoding.calibrate")
    file = Path(c.model) / "config.json"
    if not file.is_file():
        raise ValueError(f"model={c.model!r} is no folder of an export: there is no {file}")
    # Bigrams of an earlier calibration are not needed, and a damaged table must be replaceable.
    bare = ["bigrams=false"] if "bigrams" in parade_config(c.model) else []
    sampler = load(c.model, target=c.target, sampler=bare, **c.placing)
    if getattr(sampler, "drafter", None) is None:
        raise ValueError(f"{c.model} drafts no trees: there is nothing to calibrate")
    number = c.prompts + c.fit_prompts
    prompts = heldout_prompts(tokenizer=sampler.tokenizer, **(c.prompt_set | {"count": number}))
    ids = [p["prompt_ids"] for p in prompts]
    table = None
    if c.answers is not None:
        checked_manifest(c.answers, sampler.tokenizer)
        texts = (answer.ids for answer in read_answers(c.answers, "train"))
        table = count(texts, sampler.vocabulary)
    out = Path(c.out) if c.out else file.parents[1] / "calibration"
    with results(out) as written:
        knobs = fastest_tree(c, sampler, ids, table, written)
        knobs["lengths"] = fastest_lengths(c, sampler, ids[: c.prompts], written)
    keep(file, knobs, table)
    print("; ".join(f"{name}={knob}" for name, knob in knobs.items()) + f" are now in {file}")


def fastest_tree(
    c: Calibrate, sampler: BlockSampler, prompts: list[list[int]], table: Bigrams | None, out: Path
) -> dict:
    """The knobs of the trees that are fastest over all temperatures.

    Args:
        c: The command's options.
        sampler: The export's sampler.
        prompts: Token ids of `c.prompts` prompts to time and of `c.fit_prompts` to fit to.
        table: Bigrams to try, or None.
        out: Folder of calibration.csv.

    Returns:
        {"nodes": {batch size: nodes}, "sharpness": ..., "bigrams": ...}, as an export keeps them.
    """
    timed, others = prompts[: c.prompts], prompts[c.prompts :]
    seen = {t: observed(sampler, others, params_of(c, t, verify="tree")) for t in c.temperatures}
    shapes = {**shapes_of(c, seen, None), **(shapes_of(c, seen, table) if table else {})}
    found = {"table": table, "draft_ids": sampler.draft_ids}
    if sampler.markov is not None:
        found["markov"] = sampler.markov.head
    if getattr(sampler, "noise_input", None) is not None:
        found["noise"] = sampler.noise_input
    config = {**parade_config(c.model), **found}
    parts = (sampler.target, sampler.tokenizer, sampler.drafter)
    ways = {
        shape: (sampler_of({**config, **knobs}, *parts), {"verify": "tree"})
        for shape, knobs in shapes.items()
    }
    names = ("bigrams", "nodes", "sharpness")
    lines, nodes = [], {}
    for batch in c.batch_sizes:
        figures = measure(c, ways, timed, batch)
        lines += [{"batch": batch, **dict(zip(names, of)), **figures[of]} for of in ways]
        best = max(ways, key=lambda of: figures[of]["tokens/s"])
        nodes[str(batch)] = best[1]
        # For other batches only the number of nodes is open.
        ways = {of: way for of, way in ways.items() if (of[0], of[2]) == (best[0], best[2])}
    write_table(lines, out / "calibration.csv", _title(c), "decoding.calibrate")
    return {**shapes[best], "nodes": nodes}


def fastest_lengths(
    c: Calibrate, sampler: BlockSampler, prompts: list[list[int]], out: Path
) -> dict[str, dict[str, int]]:
    """The fastest lengths of drafts that are no tree.

    Args:
        c: The command's options.
        sampler: The export's sampler.
        prompts: Token ids of the prompts to time.
        out: Folder of lengths.csv.

    Returns:
        {batch size: {temperature: tokens to draft}}, with keys as text.
    """
    tried = sorted({*c.lengths, sampler.block_size})
    lines, lengths = [], {}
    for batch in c.batch_sizes:
        # Above the smallest batch size only keyed drafts use a calibrated length.
        rule = "block" if batch == min(c.batch_sizes) else "coupled"
        ways = {k: (sampler, {"verify": rule, "block_size": k}) for k in tried}
        figures = measure(c, ways, prompts, batch)
        lines += [{"batch": batch, "drafted": k, **figures[k]} for k in tried]
        rates = {f"{t:g}": f"tokens/s, T={t:g}" for t in c.temperatures}
        lengths[str(batch)] = {
            t: max(tried, key=lambda k: figures[k][rate]) for t, rate in rates.items()
        }
    write_table(lines, out / "lengths.csv", _title(c), "decoding.calibrate")
    return lengths


def _title(c: Calibrate) -> str:
    return f"{c.prompts} held-out prompts, {c.dtype}"


def shapes_of(
    c: Calibrate, seen: dict[float, tuple[Tensor, Tensor]], table: Bigrams | None
) -> dict[tuple[bool, int, float], dict]:
    """The trees to try.

    Args:
        c: The command's options.
        seen: What `observed` returned, by temperature.
        table: Bigrams whose weights are fitted too, or None.

    Returns:
        The knobs of each tree by (whether it uses bigrams, nodes, factor on the sharpness).
    """
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
    """The sampling parameters of a measured request."""
    options |= {"ignore_eos": c.ignore_eos, "seed": c.seed}
    return SamplingParams(c.max_new_tokens, temperature, **options)


def measure(
    c: Calibrate, ways: dict[Any, tuple[Sampler, dict]], prompts: list[list[int]], batch: int
) -> dict[Any, dict]:
    """Acceptance lengths and tokens/s of each way to decode.

    Every batch goes through every way in turn, so a slow minute of the machine hits them all.

    Args:
        c: The command's options.
        ways: A sampler and options of `SamplingParams`, by any name.
        prompts: Token ids.
        batch: Prompts that are decoded together.

    Returns:
        A line of figures by the same names.
    """
    batches = [prompts[i : i + batch] for i in range(0, len(prompts), batch)]
    emitted = {(name, t): [] for name in ways for t in c.temperatures}
    seconds = dict.fromkeys(emitted, 0.0)
    for rows in track([None, *batches], f"calibrate, batch {batch}"):
        for (name, (sampler, options)), t in product(ways.items(), c.temperatures):
            started = perf_counter()
            results = sampler.generate(rows or batches[0], params_of(c, t, **options))
            if rows is not None:  # else it was the warm-up
                seconds[name, t] += perf_counter() - started
                emitted[name, t] += [n for result in results for n in result.stats.emitted]
    figures = {}
    for name in ways:
        found = {t: emitted[name, t] for t in c.temperatures}
        lengths = {f"acceptance length, T={t:g}": sum(n) / len(n) for t, n in found.items()}
        rates = {f"tokens/s, T={t:g}": sum(n) / seconds[name, t] for t, n in found.items()}
        rate = sum(map(sum, found.values())) / sum(seconds[name, t] for t in c.temperatures)
        line = {**lengths, **rates, "tokens/s": rate}
        figures[name] = {
            key: round(x, 1 if key.startswith("tokens") else 2) for key, x in line.items()
        }
    return figures


def keep(config: Path, knobs: dict, table: Bigrams | None) -> None:
    """Write knobs into an export's `parade` entry, atomically, and its bigrams beside it.

    Args:
        config: The export's config.json.
        knobs: What changes in the entry.
        table: The bigrams, where `knobs["bigrams"]` uses them; else a kept table is removed.
    """
    if knobs["bigrams"]:
        write(table, config.parent)
    entry = read_config(config)
    entry["parade"] = entry_of(entry, config) | knobs  # a published drafter has none yet
    with atomic_write(config) as temporary:
        temporary.write_text(json.dumps(entry, indent=2) + "\n")
    if not knobs["bigrams"]:  # the table of an earlier calibration
        (config.parent / FILE).unlink(missing_ok=True)


if __name__ == "__main__":
    main(run)
