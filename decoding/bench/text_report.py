"""The report of the text bench: tables, JSON, answers and pictures.

bench.csv: the table. bench.json: the same with spread, milliseconds a cycle and the machine.
acceptance.csv: drafts and what was accepted of them, with vLLM's names. spec_bench/*.jsonl: answers
in Spec-Bench's format, a file a sampler. accepted.png, speed-up.png; command.txt.
"""

import csv
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
from torch import Tensor

from decoding.bench.baselines import HuggingFace
from decoding.commands.cli import typed
from decoding.commands.report import picture, write_table
from decoding.engine.cache import CachedNetwork
from decoding.engine.params import Result, SamplingParams, Stats
from decoding.engine.randomness import KeyedRandomness
from decoding.engine.sampler import Sampler
from decoding.engine.warp import warp
from decoding.samplers.plain import PlainSampler
from models.masks import causal

WIDTHS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)  # of the passes whose cost is measured
CONTEXT = 128  # tokens in front of them
REFILLED = 4  # prompts for each place of a batch, in the time between two readings of the clock
RESAMPLES = 2000  # of the prompts, for standard errors
ERROR = " ±"  # ends the name of a column of standard errors


@dataclass
class Row:
    """One sampler at one temperature and batch size, over all prompts.

    Attributes:
        name: Of the sampler, in the table.
        sampler: The sampler.
        params: Of every request.
        batch: Prompts that are decoded together.
        guarantee: Against plain decoding: 'same text' or 'same distribution'.
        plain: Plain decoding of the same weights at the same temperature and batch size, or None
            where this row is that itself.
        results: One for each prompt.
        seconds: One for each turn.
        metric: What the mean of the scores is called, '' without scores.
        scores: Whether each answer is right.
    """

    name: str
    sampler: Sampler | HuggingFace
    params: SamplingParams
    batch: int
    guarantee: str
    plain: "Row | None" = None
    results: list[Result] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    metric: str = ""
    scores: list[bool] = field(default_factory=list)

    @property
    def stats(self) -> list[Stats]:
        """The statistics of each prompt."""
        return [r.stats for r in self.results]

    @property
    def turn(self) -> int:
        """Prompts that are timed together: one alone, or several for each place of a batch."""
        return self.batch if self.batch == 1 else REFILLED * self.batch

    @property
    def lengths(self) -> list[int]:
        """Tokens of each answer."""
        return [len(r.token_ids) for r in self.results]

    @property
    def rate(self) -> float:
        """Tokens/s over all turns."""
        return sum(self.lengths) / sum(self.seconds)

    @property
    def speedups(self) -> list[float]:
        """Tokens/s of each turn over those of plain decoding.

        Not seconds over seconds: answers with the same distribution may differ in length.
        """
        plain = self.plain or self
        return [a / b for a, b in zip(self._rates(), plain._rates())]

    def _rates(self) -> list[float]:
        return [sum(n) / s for n, s in zip(self._chunks(self.lengths), self.seconds)]

    def _chunks(self, values: list) -> list[list]:
        return [values[i : i + self.turn] for i in range(0, len(values), self.turn)]

    @property
    def drafts(self) -> bool:
        """Whether the sampler is one of ours and drafts."""
        return not isinstance(self.sampler, (PlainSampler, HuggingFace))


def report(out: Path, rows: list[Row], prompts: list[dict], title: str, seed: int) -> None:
    """Print the table, and write all files.

    Args:
        out: Folder of the files.
        rows: What was measured.
        prompts: With their `id` and `prompt_ids`, in the order of each row's results.
        title: Of the table.
        seed: Of the first prompt; the others follow it.
    """
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
        write_acceptance(out / "acceptance.csv", drafting)
        draw_accepted(drafting, out / "accepted.png")


def summary(row: Row) -> dict:
    """A row of the table, by column.

    Acceptance length is tokens per target pass, the bonus or correction token included.
    """
    passes = [s.target_passes for s in row.stats]
    forwards = sum(s.target_s + s.drafter_s for s in row.stats)
    total = forwards + sum(s.sampler_s for s in row.stats)
    plain = row.plain or row
    same = sum(a.token_ids == b.token_ids for a, b in zip(row.results, plain.results))
    share = sum(row.scores) / max(1, len(row.scores))
    scored = {
        row.metric: round(share, 4),
        f"{row.metric}{ERROR}": round((share * (1 - share) / max(1, len(row.scores))) ** 0.5, 4),
    }
    return {
        "sampler": row.name,
        "temperature": row.params.temperature,
        "batch": row.batch,
        "dtype": str(plain.sampler.target.dtype).removeprefix("torch."),
        "tokens/s": round(row.rate, 1),
        "speed-up": round(median(row.speedups), 2),
        f"speed-up{ERROR}": median_error(row.speedups),
        "acceptance length": round(sum(row.lengths) / sum(passes), 2),
        f"acceptance length{ERROR}": ratio_error(row.lengths, passes),
        **(scored if row.scores else {}),
        "target passes": sum(passes),
        "drafter passes": sum(s.drafter_passes for s in row.stats),
        "outside forwards": f"{100 * (1 - forwards / total):.1f}%" if forwards else "",
        "identical to plain": f"{same}/{len(row.stats)}"
        if row.guarantee == "same text"
        else row.guarantee,
    }


def on_screen(line: dict) -> dict:
    """A line of the table with each figure and its standard error in one cell."""
    found = {}
    for key, value in line.items():
        if key != "dtype" and not key.endswith(ERROR):  # the title says it
            error = line.get(f"{key}{ERROR}", "")
            found[key] = value if error == "" else f"{value:.2f} ± {error:.2f}"
    return {"T" if key == "temperature" else key: value for key, value in found.items()}


def median_error(values: list[float]) -> float | str:
    """The standard error of a median by the bootstrap (Efron 1979), '' of one value."""
    if len(values) < 2:
        return ""
    drawn = torch.tensor(values)[_resampled(len(values))]
    return round(float(drawn.quantile(0.5, dim=1).std()), 3)


def ratio_error(above: list[int], below: list[int]) -> float | str:
    """The standard error of sum(above) / sum(below) by the bootstrap, '' of one pair."""
    if len(above) < 2:
        return ""
    drawn = _resampled(len(above))
    sums = [torch.tensor(x, dtype=torch.double)[drawn].sum(1) for x in (above, below)]
    return round(float((sums[0] / sums[1]).std()), 3)


def _resampled(count: int) -> Tensor:
    """Which prompts each of RESAMPLES draws with replacement takes, [RESAMPLES, count]."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(count, (RESAMPLES, count), generator=generator)


def cycle(row: Row) -> dict[str, float]:
    """Milliseconds per cycle (one target pass) in the drafter, the target and everything else.

    A cycle of several requests counts once for each of them.
    """
    parts = {"drafter": "drafter_s", "target": "target_s", "rest": "sampler_s"}
    passes = sum(s.target_passes for s in row.stats)
    spent = {name: sum(getattr(s, key) for s in row.stats) for name, key in parts.items()}
    return {name: round(1000 * seconds / passes, 3) for name, seconds in spent.items()}


def write_json(file: Path, rows: list[Row], lines: list[dict]) -> None:
    """Write the table's lines with quartiles and times per cycle, the command and the machine."""
    for row, line in zip(rows, lines):
        line["new tokens"] = row.lengths
        few = len(row.speedups) < 2
        line["speed-up, quartiles"] = [] if few else [round(q, 3) for q in quantiles(row.speedups)]
        if not isinstance(row.sampler, HuggingFace):
            line["ms a cycle"] = cycle(row)
    machine = {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "torch": torch.__version__,
    }
    about = {"command": typed("decoding.bench"), "machine": machine, "rows": lines}
    file.write_text(json.dumps(about, indent=1) + "\n")


def write_acceptance(file: Path, rows: list[Row]) -> None:
    """Write acceptance.csv; a position's rate is the share of drafts accepted that far."""
    found = []
    for row in rows:
        accepted = [n - 1 for s in row.stats for n in s.emitted]
        found.append(
            {
                "sampler": row.name,
                "temperature": row.params.temperature,
                "batch": row.batch,
                "num_drafts": len(accepted),
                "num_draft_tokens": sum(s.drafted for s in row.stats),
                "num_accepted_tokens": sum(accepted),
                "acceptance_length": round(1 + sum(accepted) / len(accepted), 4),
                **{
                    f"acceptance_at_pos_{i}": round(share, 4)
                    for i, share in enumerate(at_positions(row))
                },
            }
        )
    columns = max((list(line) for line in found), key=len)
    with file.open("w", newline="") as out:
        writer = csv.DictWriter(out, columns, restval=0.0)
        writer.writeheader()
        writer.writerows(found)


def at_positions(row: Row) -> list[float]:
    """The share of drafts of which more than i tokens were accepted, for i = 0, 1, ..."""
    accepted = [n - 1 for s in row.stats for n in s.emitted]
    return [sum(a > i for a in accepted) / len(accepted) for i in range(max(accepted))]


def write_answers(folder: Path, rows: list[Row], prompts: list[dict]) -> None:
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


def explain_divergence(row: Row, prompts: list[list[int]], seed: int) -> None:
    """Print where a sampler's text first differs from plain decoding, and the margin there.

    In float32 a difference is a bug. In bfloat16 a wide pass and a one-token pass round
    differently, so the two best choices may swap where they are closer than the rounding.
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


def margin(plain: Row, ids: list[int], seed: int) -> float:
    """The gap in logits between the best choice for the next token and the second best."""
    tokens = torch.tensor([ids], device=plain.sampler.device)
    with torch.inference_mode():
        logits = warp(plain.sampler.target(tokens).logits[:, -1:], plain.params)
        if plain.params.temperature > 0:
            noise = KeyedRandomness([seed], tokens.device)
            position = torch.tensor([[len(ids)]], device=tokens.device)
            logits = logits + noise.gumbel(position, logits.shape[-1])
    best, second = logits.flatten().topk(2).values.tolist()
    return best - second


def draw_accepted(rows: list[Row], file: Path) -> None:
    """Draw, for each temperature, tokens emitted per target pass and acceptance by position."""
    rows = [row for row in rows if row.batch == min(r.batch for r in rows)]
    temperatures = sorted({row.params.temperature for row in rows})
    size = (5.5 * len(temperatures), 7.0)
    with picture(file, nrows=2, ncols=len(temperatures), figsize=size) as axes:
        for (above, below), temperature in zip(axes.T, temperatures):
            here = [row for row in rows if row.params.temperature == temperature]
            for j, row in enumerate(here):
                emitted = [n for s in row.stats for n in s.emitted]
                counts, width = Counter(emitted), 0.8 / len(here)
                xs = range(1, max(emitted) + 1)
                above.bar(
                    [x - 0.4 + width * (j + 0.5) for x in xs],
                    [counts[x] / len(emitted) for x in xs],
                    width,
                )
                rates, mean = at_positions(row), sum(emitted) / len(emitted)
                label = f"{row.name}: mean {mean:.2f}"
                below.plot(range(1, len(rates) + 1), rates, marker="o", markersize=3, label=label)
            above.set_title(f"temperature {temperature:g}")
            above.set_xlabel("tokens emitted by a target pass")
            above.set_ylabel("share of target passes")
            below.set_xlabel("position in the draft")
            below.set_ylabel("share of drafts accepted so far")
            below.set_ylim(0, 1)
            below.legend(frameon=False, fontsize=8, loc="upper right")  # where there are no bars
            for axis in (above, below):
                axis.xaxis.get_major_locator().set_params(integer=True)


def draw_speedups(rows: list[Row], file: Path) -> None:
    """Draw the speed-up against plain decoding with its quartiles; a panel for each group."""
    groups: dict[tuple, list[Row]] = {}
    for row in rows:
        groups.setdefault((row.params.temperature, row.batch), []).append(row)
    most = max(map(len, groups.values()))
    size = (4.6 * len(groups), 0.32 * most + 1.4)
    with picture(file, ncols=len(groups), figsize=size) as axes:
        for axis, ((temperature, batch), here) in zip(axes[0], groups.items()):
            middle = [median(row.speedups) for row in here]
            low, high = zip(*(_quartiles(row.speedups) for row in here))
            errors = [
                [m - a for m, a in zip(middle, low)],
                [b - m for m, b in zip(middle, high)],
            ]
            colours = ["#3b6fb6" if row.drafts else "#b9b9b9" for row in here]
            names = [row.name for row in here]
            axis.barh(range(len(here)), middle, xerr=errors, color=colours, ecolor="#555555")
            axis.set_yticks(range(len(here)), names, fontsize=8)
            axis.invert_yaxis()
            axis.axvline(1, color="#555555", linewidth=0.8, linestyle=":")
            axis.set_title(f"temperature {temperature:g}, batch {batch}")
            axis.set_xlabel("speed-up against plain decoding")


def _quartiles(values: list[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = quantiles(values)
    middle = median(values)
    return min(low, middle), max(high, middle)


def profile(rows: list[Row], out: Path) -> None:
    """Print and write the times of a cycle's parts, and the cost of a target pass by its width."""
    ours = [row for row in rows if not isinstance(row.sampler, HuggingFace)]
    lines = []
    for row in ours:
        spent = cycle(row)
        share = spent["rest"] / sum(spent.values())
        lines.append(
            {
                "sampler": row.name,
                "temperature": row.params.temperature,
                "batch": row.batch,
                **{f"{name}, ms a cycle": value for name, value in spent.items()},
                "rest": f"{100 * share:.1f}%",
            }
        )
    write_table(lines, out / "profile.csv", "where a cycle's time goes", "decoding.bench")
    costs = pass_cost(ours[0].sampler)
    title = f"a pass of the target over {CONTEXT} tokens, by its width"
    lines = [{"width": width, "ms": round(ms, 3)} for width, ms in costs.items()]
    write_table(lines, out / "pass_cost.csv", title, "decoding.bench")
    with picture(out / "pass_cost.png", figsize=(5.5, 3.8)) as axes:
        axis = axes[0, 0]
        axis.plot([*costs], [*costs.values()], marker="o", markersize=3)
        axis.set_ylim(0, None)
        axis.set_xlabel("tokens in a pass of the target")
        axis.set_ylabel("milliseconds (median)")
    print(f"wrote profile.csv, pass_cost.csv and pass_cost.png into {out}")


def pass_cost(sampler: Sampler, repeats: int = 20) -> dict[int, float]:
    """Median milliseconds of a target pass over a cache, for each of WIDTHS."""
    device, found = sampler.device, {}
    network = CachedNetwork(sampler.target, causal, CONTEXT + max(WIDTHS) + 1)
    tokens = torch.zeros(1, CONTEXT + max(WIDTHS), dtype=torch.long, device=device)
    positions = torch.arange(tokens.shape[1], device=device)[None]

    def run(first: int, width: int) -> Tensor:
        these = slice(first, first + width)
        return network(tokens[:, these], positions[:, these], keep=width)

    with torch.inference_mode():
        run(0, CONTEXT)
        for width in WIDTHS:
            times = []
            for _ in range(repeats + 3):
                before = network.seconds
                run(CONTEXT, width)
                times.append(network.seconds - before)
            found[width] = 1000 * median(times[3:])
    return found
