"""The report of the text bench: tables, JSON, answers and pictures.

bench.csv: the table. bench.json: the same with spread, milliseconds a cycle, acceptance by position
and the machine. spec_bench/*.jsonl: answers in Spec-Bench's format, a file a sampler. accepted.png,
speed-up.png; command.txt.
"""

import json
import os
import platform
import re
from collections import Counter
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from statistics import median, quantiles

import torch

from decoding.bench.baselines import HuggingFace
from decoding.bench.rows import (
    ERROR,
    REFILLED,
    Row,
    cycle,
    median_error,
    on_screen,
    ratio_error,
    share_of,
)
from decoding.engine.cache import CachedNetwork
from decoding.engine.params import accepted_counts
from decoding.engine.randomness import KeyedRandomness
from decoding.engine.sampler import Sampler
from decoding.engine.warp import warp
from decoding.report import picture, write_table
from decoding.samplers.plain import PlainSampler
from models.masks import causal
from recipes.command import typed

WIDTHS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)  # of the passes whose cost is measured
CONTEXT = 128  # tokens in front of them


@dataclass
class TextRow(Row):
    """One sampler at one temperature and batch size.

    Attributes:
        guarantee: Against plain decoding: 'same text' or 'same distribution'.
        metric: The name of the mean score, '' without scores.
        scores: Whether each answer is correct.
    """

    guarantee: str = "same text"
    metric: str = ""
    scores: list[bool] = field(default_factory=list)

    @property
    def drafts(self) -> bool:
        """Return whether the sampler is one of ours and drafts."""
        return not isinstance(self.sampler, (PlainSampler, HuggingFace))

    @property
    def setting(self) -> dict:
        """Return the first columns of a table."""
        temperature = self.params.temperature
        return {"sampler": self.name, "temperature": temperature, "batch": self.batch}

    @property
    def accepted_at(self) -> list[float]:
        """Return the share of drafts with more than i accepted tokens, for i = 0, 1, ..."""
        drafts, accepted = accepted_counts(self.emitted, max(self.emitted) - 1)
        return [count / drafts for count in accepted]


def report(out: Path, rows: list[TextRow], prompts: list[dict], title: str, seed: int) -> None:
    """Print the table, and write all files; `seed` is the first prompt's, the others follow it."""
    lines = [summary(row) for row in rows]
    write_table(lines, out / "bench.csv", title, "decoding.bench", [*map(on_screen, lines)])
    print("acceptance length: tokens emitted per target pass, bonus or correction included;")
    print("speed-up: tokens/s against plain, median over prompts; ±: standard error over prompts;")
    if any(row.batch > 1 for row in rows):
        print(
            f"batches: {REFILLED} prompts for each place are timed together; passes: of each prompt"
        )
    print("same distribution: other draws")
    if rows[0].scores and (cut := sum(r.finish_reason == "length" for r in rows[0].results)):
        print(f"{cut} of {len(prompts)} answers of {rows[0].name} are cut off at max_new_tokens")
    if len({row.plain.name for row in rows if row.plain}) > 1:
        print("plain: one-token decoding of the same weights as the rows below it")
    for row in rows:
        if row.guarantee == "same text" and row.plain:
            explain_divergence(row, [p["prompt_ids"] for p in prompts], seed)
    write_json(out / "bench.json", rows, lines)
    write_answers(out / "spec_bench", rows, prompts)
    draw_speedups(rows, out / "speed-up.png")
    drafting = [row for row in rows if row.drafts]
    if drafting:
        draw_accepted(drafting, out / "accepted.png")


def summary(row: TextRow) -> dict:
    """Return a row of the table; acceptance length includes the bonus or correction token."""
    passes = [s.target_passes for s in row.stats]
    forwards = sum(s.target_s + s.drafter_s for s in row.stats)
    total = forwards + sum(s.sampler_s for s in row.stats)
    plain = row.plain or row
    scored = zip((row.metric, f"{row.metric}{ERROR}"), share_of(row.scores) if row.scores else ())
    return {
        **row.setting,
        "dtype": str(plain.sampler.target.dtype).removeprefix("torch."),
        "tokens/s": round(row.rate, 1),
        "speed-up": round(median(row.speedups), 2),
        f"speed-up{ERROR}": median_error(row.speedups),
        "acceptance length": round(sum(row.lengths) / sum(passes), 2),
        f"acceptance length{ERROR}": ratio_error(row.lengths, passes),
        **dict(scored),
        "target passes": sum(passes),
        "drafter passes": sum(s.drafter_passes for s in row.stats),
        "outside forwards": f"{100 * (1 - forwards / total):.1f}%" if forwards else "",
        "identical to plain": row.same if row.guarantee == "same text" else row.guarantee,
    }


def write_json(file: Path, rows: list[TextRow], lines: list[dict]) -> None:
    """Write the table's lines with quartiles and times per cycle, the command and the machine."""
    for row, line in zip(rows, lines):
        line["new tokens"] = row.lengths
        few = len(row.speedups) < 2
        line["speed-up, quartiles"] = [] if few else [round(q, 3) for q in quantiles(row.speedups)]
        if not isinstance(row.sampler, HuggingFace):
            line["ms a cycle"] = cycle(row.stats)
        if row.drafts:
            line["drafted tokens"] = sum(s.drafted for s in row.stats)
            line["accepted at"] = [round(share, 4) for share in row.accepted_at]
    machine = {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "torch": torch.__version__,
    }
    about = {"command": typed("decoding.bench"), "machine": machine, "rows": lines}
    file.write_text(json.dumps(about, indent=1) + "\n")


def write_answers(folder: Path, rows: list[TextRow], prompts: list[dict]) -> None:
    """Write the answers of each sampler at batch size 1 in Spec-Bench's format."""
    folder.mkdir(parents=True, exist_ok=True)
    for row in rows:
        if row.batch > 1:
            continue
        model = f"{row.name}, T={row.params.temperature:g}"
        name = re.sub(r"[^\w.=-]+", "_", model).strip("_")
        with (folder / f"{name}.jsonl").open("w") as file:
            for i, (prompt, result) in enumerate(zip(prompts, row.results)):
                choice = {
                    "index": 0,
                    "turns": [result.text],
                    "decoding_steps": [result.stats.target_passes],
                    "new_tokens": [len(result.token_ids)],
                    "wall_time": [row.seconds[i]],
                    "accept_lengths": result.stats.emitted,
                }
                if row.scores:
                    choice["right"] = [row.scores[i]]
                line = {"question_id": prompt["id"], "category": prompt.get("category", "prompts")}
                line |= {"model_id": model, "choices": [choice]}
                file.write(json.dumps(line) + "\n")


def explain_divergence(row: TextRow, prompts: list[list[int]], seed: int) -> None:
    """Print where a sampler's text first differs from plain decoding, and the margin there.

    In float32 a difference is a bug. In bfloat16 a wide pass and a one-token pass round
    differently, so the two best tokens may swap if they are closer than the rounding.
    """
    plain = row.plain
    for i, (a, b) in enumerate(zip(row.results, plain.results)):
        if a.token_ids == b.token_ids:
            continue
        pairs = zip_longest(a.token_ids, b.token_ids)  # one may end before the other
        at = next(j for j, (x, y) in enumerate(pairs) if x != y)
        gap = margin(plain, prompts[i] + b.token_ids[:at], seed + i)
        print(
            f"{row.name} at T={row.params.temperature:g}: first difference in prompt {i} at token "
            f"{at}; the two best choices are {gap:.2g} apart there ({plain.sampler.target.dtype})"
        )
        return


def margin(plain: TextRow, ids: list[int], seed: int) -> float:
    """Return the gap in logits between the best and second-best next token."""
    tokens = torch.tensor([ids], device=plain.sampler.device)
    with torch.inference_mode():
        logits = warp(plain.sampler.target(tokens).logits[:, -1:], plain.params)
        if plain.params.temperature > 0:
            noise = KeyedRandomness([seed], tokens.device)
            position = torch.tensor([[len(ids)]], device=tokens.device)
            logits = logits + noise.gumbel(position, logits.shape[-1])
    best, second = logits.flatten().topk(2).values.tolist()
    return best - second


def draw_accepted(rows: list[TextRow], file: Path) -> None:
    """Draw, for each temperature, tokens emitted per target pass and acceptance by position."""
    rows = [row for row in rows if row.batch == min(r.batch for r in rows)]
    temperatures = sorted({row.params.temperature for row in rows})
    size = (5.5 * len(temperatures), 7.0)
    with picture(file, nrows=2, ncols=len(temperatures), figsize=size) as axes:
        for (above, below), temperature in zip(axes.T, temperatures):
            here = [row for row in rows if row.params.temperature == temperature]
            for j, row in enumerate(here):
                counts, passes = Counter(row.emitted), len(row.emitted)
                width, most = 0.8 / len(here), max(counts) + 1
                xs = [x - 0.4 + width * (j + 0.5) for x in range(1, most)]
                above.bar(xs, [counts[x] / passes for x in range(1, most)], width)
                label = f"{row.name}: mean {sum(row.emitted) / passes:.2f}"
                rates = row.accepted_at
                below.plot(range(1, 1 + len(rates)), rates, marker="o", markersize=3, label=label)
            above.set(
                title=f"temperature {temperature:g}", xlabel="tokens emitted by a target pass",
                ylabel="share of target passes",
            )  # fmt: skip
            below.set(
                xlabel="position in the draft",
                ylabel="share of drafts accepted so far",
                ylim=(0, 1),
            )
            below.legend(frameon=False, fontsize=8, loc="upper right")  # where there are no bars
            for axis in (above, below):
                axis.xaxis.get_major_locator().set_params(integer=True)


def draw_speedups(rows: list[TextRow], file: Path) -> None:
    """Draw the speed-up over plain decoding with its quartiles, one panel for each group."""
    groups: dict[tuple, list[TextRow]] = {}
    for row in rows:
        groups.setdefault((row.params.temperature, row.batch), []).append(row)
    size = (4.6 * len(groups), 0.32 * max(map(len, groups.values())) + 1.4)
    with picture(file, ncols=len(groups), figsize=size) as axes:
        for axis, ((temperature, batch), here) in zip(axes[0], groups.items()):
            found = [row.speedups if len(row.speedups) > 1 else 2 * row.speedups for row in here]
            middle = [median(speedups) for speedups in found]
            around = [[max(0, m - q[0]), max(0, q[2] - m)] for m, q in
                      zip(middle, map(quantiles, found))]  # fmt: skip
            colours = ["#3b6fb6" if row.drafts else "#b9b9b9" for row in here]
            errors = [*zip(*around)]
            axis.barh(range(len(here)), middle, xerr=errors, color=colours, ecolor="#555555")
            axis.set_yticks(range(len(here)), [row.name for row in here], fontsize=8)
            axis.invert_yaxis()
            axis.axvline(1, color="#555555", linewidth=0.8, linestyle=":")
            axis.set_title(f"temperature {temperature:g}, batch {batch}")
            axis.set_xlabel("speed-up against plain decoding")


def profile(rows: list[TextRow], out: Path) -> None:
    """Print and write the cost of a target pass by its width."""
    title = f"a pass of the target over {CONTEXT} tokens, by its width"
    costs = pass_cost(rows[0].sampler)
    lines = [{"width": width, "ms": round(ms, 3)} for width, ms in costs.items()]
    write_table(lines, out / "pass_cost.csv", title, "decoding.bench")


def pass_cost(sampler: Sampler, repeats: int = 20) -> dict[int, float]:
    """Return the median milliseconds of a target pass over a cache, for each of WIDTHS."""
    network, found = CachedNetwork(sampler.target, causal, CONTEXT + max(WIDTHS) + 1), {}
    tokens = torch.zeros(1, CONTEXT + max(WIDTHS), dtype=torch.long, device=sampler.device)
    positions = torch.arange(tokens.shape[1], device=sampler.device)[None]

    def seconds(first: int, width: int) -> float:
        these, before = slice(first, first + width), network.seconds
        network(tokens[:, these], positions[:, these], keep=width)
        return network.seconds - before

    with torch.inference_mode():
        seconds(0, CONTEXT)
        for width in WIDTHS:
            times = [seconds(CONTEXT, width) for _ in range(repeats + 3)]
            found[width] = 1000 * median(times[3:])
    return found
