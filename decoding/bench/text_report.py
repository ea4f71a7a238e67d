"""The report of the text bench: tables, JSON, answers and pictures (docs/how_to/benchmarks.md)."""

import json
import os
import platform
import re
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from statistics import median

import torch

from decoding.bench.baselines import HuggingFace
from decoding.bench.rows import ERROR, REFILLED, Row, cycle, on_screen, ratio_error, share_of
from decoding.engine.params import accepted_counts
from decoding.engine.randomness import KeyedRandomness
from decoding.engine.warp import warp
from decoding.report import draws, picture, write_table
from decoding.samplers.plain import PlainSampler
from models.packed import precision
from recipes.command import typed


@dataclass
class TextRow(Row):
    """One sampler at one temperature and batch size.

    Attributes:
        guarantee: Against plain decoding: 'same text' or 'same distribution'.
        metric: The name of the mean score, '' without scores.
        scores: Whether each answer is correct.
        context: Tokens of every prompt, where the bench compares several numbers of them.
        asked: The prompts, as token ids.
    """

    guarantee: str = "same text"
    metric: str = ""
    scores: list[bool] = field(default_factory=list)
    context: int | None = None
    asked: list[list[int]] = field(default_factory=list)

    @property
    def drafts(self) -> bool:
        """Return whether the sampler is one of ours and drafts."""
        return not isinstance(self.sampler, (PlainSampler, HuggingFace))


def report(out: Path, rows: list[TextRow], prompts: list[dict], title: str, seed: int) -> None:
    """Print the table, and write all files; `seed` is the first prompt's, the others follow it."""
    lines = [summary(row) for row in rows]
    write_table(lines, out / "bench.csv", title, "decoding.bench", [*map(on_screen, lines)])
    print("acceptance length: tokens emitted per target pass, bonus or correction included;")
    print("speed-up: tokens/s against plain, median over prompts; ±: standard error over prompts;")
    print(f"batches: {REFILLED} prompts for each place are timed together; passes: of each prompt;")
    print("same distribution: other draws; plain: of the same weights as the rows below it")
    if rows[0].scores and (cut := sum(r.finish_reason == "length" for r in rows[0].results)):
        print(f"{cut} of {len(prompts)} answers of {rows[0].name} are cut off at max_new_tokens")
    for row in rows:
        if row.guarantee == "same text" and row.plain:
            explain_divergence(row, row.asked, seed)
    write_json(out / "bench.json", rows, lines)
    write_answers(out / "spec_bench", rows, prompts)
    drafting = [row for row in rows if row.drafts]
    if draws():
        draw_speedups(rows, out / "speed-up.png")
        if drafting and rows[0].context is not None:
            draw_contexts(drafting, out / "context.png")
        elif drafting:
            draw_accepted(drafting, out / "accepted.png")
    for here in settings(drafting):
        print(conclusion(max(here, key=lambda row: median(row.speedups))))


def settings(rows: list[TextRow]) -> list[list[TextRow]]:
    """Return the rows of each temperature, batch size and context."""
    groups: dict[tuple, list[TextRow]] = {}
    for row in rows:
        groups.setdefault((row.params.temperature, row.batch, row.context), []).append(row)
    return [*groups.values()]


def setting(row: TextRow) -> str:
    """Say at which temperature a row was measured, and its batch size and context."""
    said = [f"T={row.params.temperature:g}"]
    said += [f"batch {row.batch}"] if row.batch > 1 else []
    said += [f"{row.context} tokens of context"] if row.context is not None else []
    return ", ".join(said)


def conclusion(row: TextRow) -> str:
    """Say in words what a sampler gives."""
    prompts, what = len(row.results), "the distribution of plain decoding"
    if row.guarantee == "same text":
        same = row.same == f"{prompts}/{prompts}"
        what = "the same text as plain decoding" + ("" if same else f" in {row.same} prompts")
    speed = round(median(row.speedups), 1)
    slower = ": plain decoding is faster" if speed < 1 else ""
    return f"{row.name} at {setting(row)}: {what}, {speed} times as fast{slower}"


def summary(row: TextRow) -> dict:
    """Return a row of the table; acceptance length includes the bonus or correction token."""
    passes = [s.target_passes for s in row.stats]
    forwards = sum(s.target_s + s.drafter_s for s in row.stats)
    total = forwards + sum(s.sampler_s for s in row.stats)
    plain = row.plain or row
    scored = zip((row.metric, f"{row.metric}{ERROR}"), share_of(row.scores) if row.scores else ())
    return {
        "sampler": row.name,
        "temperature": row.params.temperature,
        "batch": row.batch,
        **({} if row.context is None else {"context": row.context}),
        "dtype": precision(plain.sampler.target),
        **row.speedup,
        "acceptance length": round(sum(row.lengths) / sum(passes), 2),
        f"acceptance length{ERROR}": ratio_error(row.lengths, passes),
        **dict(scored),
        "target passes": sum(passes),
        "drafter passes": sum(s.drafter_passes for s in row.stats),
        "outside forwards": f"{100 * (1 - forwards / total):.1f}%" if forwards else "",
        "identical to plain": row.same if row.guarantee == "same text" else row.guarantee,
    }


def write_json(file: Path, rows: list[TextRow], lines: list[dict]) -> None:
    """Write the table's lines with times per cycle, the command and the machine."""
    for row, line in zip(rows, lines):
        line["new tokens"] = row.lengths
        if not isinstance(row.sampler, HuggingFace):
            line["ms a cycle"] = cycle(row.stats)
        if row.drafts:
            line["drafted tokens"] = sum(s.drafted for s in row.stats)
            drafts, accepted = accepted_counts(row.emitted, max(row.emitted) - 1)
            line["accepted at"] = [round(count / drafts, 4) for count in accepted]
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
    for row in [row for row in rows if row.batch == 1]:
        model = f"{row.name}, {setting(row)}"
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
    plain = row.plain or row
    for i, (a, b) in enumerate(zip(row.results, plain.results)):
        if a.token_ids == b.token_ids:
            continue
        pairs = zip_longest(a.token_ids, b.token_ids)  # one may end before the other
        at = next(j for j, (x, y) in enumerate(pairs) if x != y)
        gap = margin(plain, prompts[i] + b.token_ids[:at], seed + i)
        print(
            f"{row.name} at {setting(row)}: first difference in prompt {i} at token {at}; the two "
            f"best choices are {gap:.2g} apart there ({plain.sampler.target.dtype})"
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
    """Draw, for each temperature, the tokens emitted per target pass."""
    rows = [row for row in rows if row.batch == min(r.batch for r in rows)]
    temperatures = sorted({row.params.temperature for row in rows})
    with picture(file, ncols=len(temperatures), figsize=(5.5 * len(temperatures), 3.5)) as axes:
        for axis, temperature in zip(axes[0], temperatures):
            here = [row for row in rows if row.params.temperature == temperature]
            edges = [n + 0.5 for n in range(1 + max(max(row.emitted) for row in here))]
            means = [sum(row.emitted) / len(row.emitted) for row in here]
            labels = [f"{row.name}: mean {mean:.2f}" for row, mean in zip(here, means)]
            axis.hist([row.emitted for row in here], edges, density=True, label=labels)
            axis.set(
                title=f"temperature {temperature:g}",
                xlabel="tokens emitted by a target pass",
                ylabel="share of target passes",
            )
            axis.xaxis.get_major_locator().set_params(integer=True)
            axis.legend(frameon=False, fontsize=8)


def draw_contexts(rows: list[TextRow], file: Path) -> None:
    """Draw, for each temperature, the acceptance length by tokens of context, and its error."""
    rows = [row for row in rows if row.batch == min(r.batch for r in rows)]
    temperatures = sorted({row.params.temperature for row in rows})
    with picture(file, ncols=len(temperatures), figsize=(5.5 * len(temperatures), 3.5)) as axes:
        for axis, temperature in zip(axes[0], temperatures):
            here = [row for row in rows if row.params.temperature == temperature]
            for name in dict.fromkeys(row.name for row in here):
                lines = [(row.context, summary(row)) for row in here if row.name == name]
                means = [line["acceptance length"] for _, line in lines]
                errors = [line[f"acceptance length{ERROR}"] or 0 for _, line in lines]
                at = [context for context, _ in lines]
                axis.errorbar(at, means, errors, label=name, marker="o", markersize=4, capsize=2)
            ticks = sorted({row.context for row in here if row.context is not None})
            axis.set_xscale("log", base=2)
            axis.set_xticks(ticks, [str(n) for n in ticks], fontsize=8)
            axis.minorticks_off()
            axis.set(
                title=f"temperature {temperature:g}",
                xlabel="tokens of context",
                ylabel="acceptance length",
            )
            axis.legend(frameon=False, fontsize=8)


def draw_speedups(rows: list[TextRow], file: Path) -> None:
    """Draw the speed-up over plain decoding with its quartiles, one panel for each group."""
    groups = settings(rows)
    size = (4.6 * len(groups), 0.32 * max(map(len, groups)) + 1.4)
    with picture(file, ncols=len(groups), figsize=size) as axes:
        for axis, here in zip(axes[0], groups):
            axis.boxplot([row.speedups for row in here], orientation="horizontal", showfliers=False)
            axis.set_yticks(range(1, 1 + len(here)), [row.name for row in here], fontsize=8)
            axis.invert_yaxis()
            axis.axvline(1, color="#555555", linewidth=0.8, linestyle=":")
            axis.set_title(setting(here[0]))
            axis.set_xlabel("speed-up against plain decoding")
