"""`python -m decoding.bench.limits model=runs/deer_stage2/export`: acceptance against its limit.

Two limits, each with what is measured in the same run. The first is how many drafted tokens can be
accepted, and what keeps it from all: the drafter's own error, or its independent positions
(`decoding/bench/overlap.py`). The second is the speed-up that the accepted tokens allow:
tau t(1) / (t_draft + t_verify), which leaves out the work outside both networks. Written are
limits.csv, positions.csv, speed.csv and limits.png.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from decoding.bench.options import results_folder
from decoding.bench.overlap import accepted, copies, drafted_paths, own_paths, own_trees
from decoding.bench.text import Bench, measure
from decoding.bench.text_report import Row, cycle
from decoding.commands.cli import main, parse, quiet
from decoding.commands.options import PromptOptions, option
from decoding.commands.progress import track
from decoding.commands.report import picture, results, write_table
from decoding.engine.randomness import KeyedRandomness
from decoding.loading import is_drafter, parade_config

LIMIT, MARGINALS = "limit of one path", "target's own marginals"
TREE = "tree of the target's own marginals"


@dataclass(frozen=True, kw_only=True)
class Limits(PromptOptions):
    """Decode held-out prompts as the bench does, and estimate limits at some of their cycles."""

    EXAMPLE: ClassVar[str] = "model=runs/deer_stage2/export prompts=8 draws=32"

    target: str | None = option(None, "a target instead of the one that the export names")
    prompts: int = option(16, "how many held-out prompts", least=2)
    temperature: float = option(1.0, "above 0: at 0 whatever is accepted is the limit")
    block_size: int | None = option(
        None, "tokens drafted; null: the drafter's own, whatever a calibration has found", least=1
    )
    cycles: int = option(4, "of each prompt, after whose prefixes limits are estimated", least=1)
    draws: int = option(64, "paths drawn after each prefix", least=2)

    def __post_init__(self):
        super().__post_init__()
        if not self.temperature > 0:
            raise ValueError(
                f"temperature={self.temperature} is not allowed: at 0 whatever is accepted is the "
                "limit, so give one above 0"
            )


def run(argv: list[str]) -> None:
    """Run the command with its arguments `key=value`."""
    quiet()
    c = parse(argv, Limits, "decoding.bench.limits")
    config = parade_config(c.model)
    if not is_drafter(config):
        raise ValueError(f"{c.model} is no drafter: without drafts there is no limit to measure")
    if config.get("noise_input"):
        raise ValueError(
            f"{c.model} is a drafter that reads the noise of decoding, for which there is no such "
            "limit: measure the drafter that it was trained from"
        )
    # One length for all rules and both limits.
    c = replace(c, block_size=c.block_size or config.get("block_size"))
    bench = Bench(
        prompt_lookup=0,
        temperatures=(c.temperature,),
        **{f.name: getattr(c, f.name) for f in fields(PromptOptions)},
        **{name: getattr(c, name) for name in ("target", "block_size")},
    )
    with results(results_folder(c, "limits")) as out:
        rows, prompts = measure(bench)
        drafting = [row for row in rows if row.drafts]
        found = probe(c, drafting, [p["prompt_ids"] for p in prompts])
        report(c, drafting, found, out)


def probe(c: Limits, rows: list[Row], prompts: list[list[int]]) -> dict[str, Tensor]:
    """Acceptance probabilities of every rule, and both limits.

    Args:
        c: The command's options.
        rows: Of the samplers that draft, one for each rule.
        prompts: Token ids.

    Returns:
        P(the first i drafted tokens are accepted) for i = 1..k, [prompts, cycles, k], by rule or
        limit.
    """
    sampler, k = rows[0].sampler, c.block_size
    # Each draw is a request that is decoded alone, so the tree is that of the smallest batch.
    sampler.nodes = {1: sampler.nodes[min(sampler.nodes)]}
    # A cycle depends on nothing else of a request; k new tokens let the target draw its own paths.
    params = {row.params.verify: replace(row.params, max_new_tokens=k) for row in rows}
    of_one_path = replace(rows[0].params, verify="rejection", max_new_tokens=k)
    ways = [(rule, accepted, params[rule]) for rule in params]
    ways += [(LIMIT, drafted_paths, of_one_path), (MARGINALS, own_paths, of_one_path)]
    if "tree" in params:
        ways.append((TREE, own_trees, params["tree"]))
    prefixes = [*cycle_starts(rows[0], prompts, c.cycles)]
    found = {name: [] for name, _, _ in ways}
    with torch.inference_mode():
        for i, prefix in enumerate(track(prefixes, "limits")):
            seeds = [*range(i * c.draws, (i + 1) * c.draws)]
            for name, estimate, how in ways:
                randomness = KeyedRandomness(seeds, sampler.device)
                batch = copies(sampler, prefix, how, c.draws, randomness)
                found[name].append(estimate(sampler, batch, k, how).mean(0).cpu())
    return {name: torch.stack(x).view(len(prompts), c.cycles, k) for name, x in found.items()}


def cycle_starts(row: Row, prompts: list[list[int]], count: int) -> Iterator[list[int]]:
    """The prefixes of `count` of each prompt's cycles, evenly spread over the answer."""
    for prompt, result in zip(prompts, row.results):
        cycles = result.stats.emitted
        for n in range(count):
            done = sum(cycles[: n * len(cycles) // count])
            yield prompt + result.token_ids[:done]


def report(c: Limits, rows: list[Row], found: dict[str, Tensor], out: Path) -> None:
    """Print the tables, and write them and the picture."""
    k = found[LIMIT].shape[-1]
    where = f"{c.prompts} held-out prompts, {c.cycles} cycles each, {c.draws} draws"
    title = f"accepted drafted tokens of {k}, T={c.temperature:g}, {c.dtype}: {where}"
    dependent = getattr(rows[0].sampler, "markov", None) is not None
    write_table(tokens(found, dependent), out / "limits.csv", title, "decoding.bench.limits")
    print("accepted: drafted tokens of a cycle, without the target's own; ±: standard error over")
    print("prompts. The limit is that of any verification of one path; a tree has several.")
    title = "share of drafts of which the first tokens are accepted"
    write_table(positions(found), out / "positions.csv", title, "decoding.bench.limits")
    most = 1 + float(found[LIMIT].sum(-1).mean())
    title = f"speed-up, T={c.temperature:g}, batch 1, and what the forwards of a cycle allow"
    write_table(
        [speed(row, most) for row in rows], out / "speed.csv", title, "decoding.bench.limits"
    )
    draw(found, out / "limits.png")


def tokens(found: dict[str, Tensor], dependent: bool = False) -> list[dict]:
    """Lines of limits.csv: accepted tokens of each rule, the limits, and both losses.

    Args:
        found: What `probe` returned.
        dependent: Whether the drafter has a Markov head. What it loses is not told apart then: the
            target's own marginals are those of a drafter with independent positions.
    """
    limit, marginals, k = found[LIMIT].sum(-1), found[MARGINALS].sum(-1), found[LIMIT].shape[-1]
    parts = {f"accepted, {rule}": found[rule].sum(-1) for rule in rules(found)}
    if TREE in found:
        parts[TREE] = found[TREE].sum(-1)
    parts[LIMIT] = limit
    if dependent:
        parts[MARGINALS] = marginals
    else:
        parts["lost to the drafter's error, at least"] = marginals - limit
        parts["lost to independent positions, at most"] = k - marginals
    return [
        {
            "of a cycle": name,
            "tokens": round(float(x.mean()), 3),
            "±": round(float(x.mean(1).std() / len(x) ** 0.5), 3),
            "quartiles over cycles": "{:.2f} to {:.2f}".format(
                *torch.quantile(x, x.new_tensor([0.25, 0.75])).tolist()
            ),
            "of the block": f"{100 * float(x.mean()) / k:.1f}%",
            "of the limit": ""
            if name.startswith("lost")
            else f"{100 * float(x.mean() / limit.mean()):.1f}%",
        }
        for name, x in parts.items()
    ]


def positions(found: dict[str, Tensor]) -> list[dict]:
    """Lines of positions.csv: P(the first i drafted tokens are accepted) by i."""
    means = {name: x.mean((0, 1)).tolist() for name, x in found.items()}
    k = found[LIMIT].shape[-1]
    return [
        {"position": i + 1, **{name: round(x[i], 4) for name, x in means.items()}} for i in range(k)
    ]


def speed(row: Row, most: float) -> dict:
    """A line of speed.csv: the measured speed-up of one rule, and tau t(1) / (t_draft + t_verify).

    The times are those of all forwards, prefills included, over the target's passes. So the
    measured speed-up falls short of the allowed one by the work outside the forwards.

    Args:
        row: Of the rule.
        most: The acceptance length at the limit.
    """
    tokens = sum(len(r.token_ids) for r in row.results)
    tau = tokens / sum(s.target_passes for s in row.stats)
    spent, plain = cycle(row), cycle(row.plain)
    gain = plain["target"] / (spent["drafter"] + spent["target"])
    measured = row.rate / row.plain.rate
    return {
        "sampler": row.name,
        "acceptance length": round(tau, 2),
        "t(1), ms": plain["target"],
        "t_draft, ms": spent["drafter"],
        "t_verify, ms": spent["target"],
        "rest, ms": spent["rest"],
        "allowed": round(tau * gain, 3),
        "measured": round(measured, 3),
        "of the allowed": f"{100 * measured / (tau * gain):.1f}%",
        "allowed at the limit": "" if row.params.verify == "tree" else round(most * gain, 3),
    }


def rules(found: dict[str, Tensor]) -> list[str]:
    """The verification rules among the names of `found`."""
    return [name for name in found if name not in (LIMIT, MARGINALS, TREE)]


def draw(found: dict[str, Tensor], file: Path) -> None:
    """Draw P(the first i drafted tokens are accepted) by i, and their sums against the limits."""
    with picture(file, ncols=2, figsize=(11, 3.8)) as axes:
        curves, bars = axes[0]
        k, names = found[LIMIT].shape[-1], rules(found)
        for name, x in found.items():
            style = {} if name in names else {"linestyle": "--", "color": "#555555"}
            marker = {LIMIT: "o", MARGINALS: "^", TREE: "s"}.get(name, ".")
            rates = x.mean((0, 1)).tolist()
            curves.plot(range(1, k + 1), rates, marker=marker, markersize=4, label=name, **style)
        curves.set_xlabel("position in the draft")
        curves.set_ylabel("share of drafts accepted so far")
        curves.set_ylim(0, 1)
        curves.xaxis.get_major_locator().set_params(integer=True)
        curves.legend(frameon=False, fontsize=8)
        sums = [found[name].sum(-1) for name in names]
        errors = [float(x.mean(1).std() / len(x) ** 0.5) for x in sums]
        means = [float(x.mean()) for x in sums]
        bars.barh(range(len(names)), means, xerr=errors, color="#3b6fb6", ecolor="#555555")
        bars.set_yticks(range(len(names)), names)
        bars.invert_yaxis()
        for name, line in ((LIMIT, "--"), (MARGINALS, ":")):
            at = float(found[name].sum(-1).mean())
            bars.axvline(at, color="#555555", linestyle=line, label=f"{name}: {at:.2f}")
        bars.set_xlim(0, k)
        bars.set_xlabel(f"accepted drafted tokens of {k} in a cycle")
        bars.legend(frameon=False, fontsize=8, loc="lower right")


if __name__ == "__main__":
    main(run)
