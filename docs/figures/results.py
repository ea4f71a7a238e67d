"""Draw a picture of each page of docs/results from the page's first table.

python -m docs.figures.results            # all of them
python -m docs.figures.results pcllm spiffy
"""

import re
import sys
from collections.abc import Callable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from docs.figures.tables import table

HERE = Path(__file__).parent
OURS, PUBLISHED, OTHERS = "#e07b39", "#3f51b5", "#b0b6c8"
SHADES = [OTHERS, PUBLISHED, OURS]

Row = dict[str, str]
Figure = plt.Figure


def number(cell: str, part: int = 0) -> float | None:
    """The first number of a cell, or of one of its parts that semicolons separate.

    Args:
        cell: A cell of a table, such as `**2.71 ± 0.11**; 1.91`.
        part: Which of the cell's parts.
    """
    parts = cell.split(";")
    found = re.search(r"\d[\d.]*", parts[part]) if part < len(parts) else None
    return float(found[0]) if found else None


def bars(axes: plt.Axes, title: str, rows: list[tuple[str, float, str]], fmt: str = "%.2f") -> None:
    """Draw one horizontal bar a row: its label, its value, its colour."""
    at = range(len(rows))[::-1]
    drawn = axes.barh(at, [value for _, value, _ in rows], color=[c for *_, c in rows], height=0.7)
    axes.bar_label(drawn, fmt=fmt, padding=3, fontsize=7)
    axes.set_yticks(at, [label for label, *_ in rows])
    axes.set_xlim(0, 1.15 * max(value for _, value, _ in rows))
    finish(axes, title)
    axes.set_xticks([])


def finish(axes: plt.Axes, title: str) -> None:
    """Give a panel its title and small labels, and take its frame away."""
    axes.set_title(title, fontsize=9, loc="left")
    axes.tick_params(labelsize=7, length=0)
    axes.spines[:].set_visible(False)


def panels(count: int, height: float = 2.8, **options) -> tuple[Figure, list[plt.Axes]]:
    """Make a figure of panels that stand next to each other."""
    fig, axes = plt.subplots(1, count, figsize=(9, height), layout="constrained", **options)
    return fig, list(axes) if count > 1 else [axes]


def colour(method: str) -> str:
    """Return the colour of what is ours, of what a paper published, or of another program."""
    if re.search(r"transformers|vLLM|untrained|sequential", method):
        return OTHERS
    return OURS if re.search(r"tree|replay|layerwise|fused|next block", method) else PUBLISHED


def chosen(rows: list[Row], column: str, keep: Callable[[Row], bool], label: str = "method"):
    """Return label, value and colour of the rows to keep that have a number in a column."""
    found = [(row[label], number(row[column]), colour(row[label])) for row in rows if keep(row)]
    return [(name, value, shade) for name, value, shade in found if value is not None]


def small(rows: list[Row]) -> Figure:
    """Speed-ups on HumanEval by method, and of DEER's tree by benchmark and temperature."""
    fig, (left, right) = panels(2)
    greedy = [r for r in rows if r["benchmark"] == "HumanEval" and r["T"] == "0"]
    bars(
        left,
        "HumanEval, T=0: times plain decoding",
        chosen(greedy, "speed-up", lambda r: "plain" not in r["method"]),
    )
    trees = [
        r | {"method": f"{r['benchmark']}, T={r['T']}"} for r in rows if r["method"] == "deer, tree"
    ]
    found = chosen(trees, "speed-up", lambda r: True)
    bars(right, "deer, tree: times plain decoding", [(n, v, OURS) for n, v, _ in found])
    return fig


def dflash(rows: list[Row]) -> Figure:
    """Acceptance lengths on HumanEval at T=0, of chains and of trees."""
    fig, axes = panels(2)
    named = [r for r in rows if r["benchmark"] == "HumanEval" and "vLLM" not in r["method"]]
    for panel, way in zip(axes, ("chain", "tree")):
        found = []
        for row in named:
            method, _, ending = row["method"].rpartition(", ")
            if ending == way:
                shade = OURS if "layerwise" in method else OTHERS
                shade = PUBLISHED if "one context" in method else shade
                found.append((method, number(row["acceptance length"]), shade))
        bars(panel, f"HumanEval, {way}s: tokens a pass", found)
    return fig


def deer_ablations(rows: list[Row]) -> Figure:
    """Acceptance length and speed by block size."""
    fig, (left, right) = panels(2)
    blocks = [r for r in rows if r["variant"].startswith("block of")]
    sizes = [int(number(r["variant"])) for r in blocks]
    lines = {"T=0, chain": PUBLISHED, "T=0, tree": OURS, "T=1, `block`": "#7986cb"}
    lines["T=1, tree"] = "#f0b68d"
    for part, (axes, title) in enumerate(
        [(left, "tokens a target pass, by block size"), (right, "times plain decoding")]
    ):
        for column, shade in lines.items():
            values = [number(r[column], part) for r in blocks]
            axes.plot(sizes, values, marker="o", markersize=4, color=shade)
            axes.annotate(
                column.replace("`", ""),
                (sizes[-1], values[-1]),
                (6, -3),
                textcoords="offset points",
                color=shade,
                fontsize=7,
            )
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [str(n) for n in sizes])
        axes.minorticks_off()
        axes.set_xlim(sizes[0] / 1.2, sizes[-1] * 2)
        axes.grid(axis="y", color="#e8e8ee")
        finish(axes, title)
    return fig


def markov_head(rows: list[Row]) -> Figure:
    """Acceptance lengths with and without a head, grouped by verification."""
    fig, axes = panels(2)
    columns = [c for c in rows[0] if c.startswith("T=")]
    for panel, benchmark in zip(axes, ("library", "HumanEval")):
        kinds = ("more steps", "head alone", "together")
        series = [
            r for k in kinds for r in rows if (r["drafter"], r["benchmark"]) == (k, benchmark)
        ]
        if benchmark == "HumanEval":  # the frozen drafter had another baseline
            series = [r for r in series if r["drafter"] != "head alone"]
        width = 0.8 / len(series)
        for i, row in enumerate(series):
            at = [x + (i - (len(series) - 1) / 2) * width for x in range(len(columns))]
            shade = SHADES[kinds.index(row["drafter"])]
            label = {"head alone": "a head alone", "together": "with a head"}
            drawn = panel.bar(
                at,
                [number(row[c]) for c in columns],
                width,
                color=shade,
                label=label.get(row["drafter"], row["drafter"]),
            )
            panel.bar_label(drawn, fmt="%.2f", fontsize=6)
        panel.set_xticks(range(len(columns)), [c.replace("`", "") for c in columns])
        finish(panel, f"{benchmark}: tokens a target pass")
        panel.set_yticks([])
        panel.legend(fontsize=7, frameon=False)
    return fig


def pcllm(rows: list[Row]) -> Figure:
    """Tokens per forward in the lab and on the real model."""
    fig, (left, right) = panels(2, height=2.0)
    library = [r for r in rows if r["method"].startswith("`jacobi") and "K = 1" not in r["method"]]
    bars(left, "lab, T=0: tokens per forward", plainly(library))
    real = [r for r in rows if r["benchmark"] == "HumanEval"]
    bars(right, "SmolLM2, T=0: tokens per forward", plainly(real))
    return fig


def plainly(rows: list[Row], column: str = "acceptance length") -> list[tuple[str, float, str]]:
    """Return the rows of one column, labels without backticks."""
    named = [r | {"method": r["method"].replace("`", "")} for r in rows]
    return chosen(named, column, lambda r: True)


def asarm(rows: list[Row]) -> Figure:
    """Calls and speed against sequential decoding."""
    fig, axes = panels(2)
    named = [r | {"method": r["method"] + (f", k = {r['k']}" if r["k"] else "")} for r in rows]
    bars(axes[0], "calls of the network, of sequential decoding", plainly(named, "calls"), "%.3f")
    bars(axes[1], "times the speed of sequential decoding", plainly(named, "speed-up"))
    return fig


def along_training(rows: list[Row], gain: str, title: str, quality: str) -> Figure:
    """A column of what is gained and the samples' quality along a training."""
    fig, axes = panels(2, height=2.2)
    steps = [int(number(r["steps"])) for r in rows]
    for panel, column, said in (
        (axes[0], gain, title),
        (axes[1], quality, "perplexity of the samples, by SmolLM2"),
    ):
        values, errors = ([number(r[column].replace("±", ";"), i) for r in rows] for i in (0, 1))
        known = None if None in errors else errors
        panel.errorbar(steps, values, known, marker="o", markersize=4, color=PUBLISHED)
        panel.set_xticks(steps, [f"{r['steps']} steps\nloss {r['loss']}" for r in rows])
        panel.grid(axis="y", color="#e8e8ee")
        finish(panel, said)
    return fig


def asarm_training(rows: list[Row]) -> Figure:
    """Calls and the samples' quality along a training."""
    title = "calls of assd, of sequential decoding"
    return along_training(rows, "calls", title, "perplexity, sequential")


def spiffy_training(rows: list[Row]) -> Figure:
    """Passes that a graph saves and the samples' quality along a training."""
    return along_training(rows, "NFE speed-up", "times fewer passes, S = 1, D = 10", "perplexity")


def spiffy(rows: list[Row]) -> Figure:
    """NFE speed-ups, held out and on the calibration's traces."""
    fig, axes = panels(2)
    held = [
        r | {"method": f"{r['method']}, {r['rule']}"} for r in rows if "traces" not in r["method"]
    ]
    bars(axes[0], "held-out prompts: times fewer passes", plainly(held, "NFE speed-up"))
    traces = [
        r | {"method": f"{r['method'].removesuffix(', on the traces')}, D = {r['D']}"}
        for r in rows
        if "traces" in r["method"]
    ]
    bars(axes[1], "calibration's traces: times fewer passes", plainly(traces, "NFE speed-up"))
    return fig


def cspd(rows: list[Row]) -> Figure:
    """Images a second by head and batch."""
    fig, axes = panels(3, height=2.2)
    shades = {"sequential": OTHERS, "exact": OURS, "relaxed": PUBLISHED}
    for panel, column in zip(axes, ("images/s, batch 1", "batch 8", "batch 128")):
        named = [r | {"method": f"{r['head']}, {r['method'].split(' (')[0]}"} for r in rows]
        found = [
            (name, value, shades[name.split(", ")[1]])
            for name, value, _ in chosen(named, column, lambda r: True)
        ]
        bars(panel, column.replace("images/s, ", "").capitalize() + ": images a second", found)
    return fig


def context(rows: list[Row]) -> Figure:
    """Acceptance length by tokens of context, with its standard error."""
    fig, (axes,) = panels(1)
    columns = [c for c in rows[0] if re.fullmatch(r"[\d,]+", c)]
    at = [int(c.replace(",", "")) for c in columns]
    for row, shade in zip(rows, (PUBLISHED, OURS)):
        values = [number(row[c]) for c in columns]
        errors = [number(row[c].partition("±")[2]) or 0 for c in columns]
        axes.errorbar(
            at, values, errors, label=row["drafter"], color=shade, marker="o", markersize=4
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(at, columns)
    axes.minorticks_off()
    axes.set_ylim(bottom=1)
    axes.grid(axis="y", color="#e8e8ee")
    axes.legend(fontsize=7, frameon=False, loc="lower left")
    finish(axes, "SmolLM2, T=0: tokens a target pass, by tokens of context")
    return fig


def tail(rows: list[Row]) -> Figure:
    """Acceptance lengths on HumanEval by drafter, of chains and trees."""
    fig, axes = panels(3, height=1.6)
    for panel, column in zip(axes, ("T=0, chain", "T=0, tree", "T=1, `block`")):
        shades = [PUBLISHED] + [OURS] * (len(rows) - 1)
        named = [(r["drafter"], number(r[column]), shade) for r, shade in zip(rows, shades)]
        bars(panel, column.replace("`", ""), [found for found in named if found[1]])
    return fig


def minutes(rows: list[Row]) -> Figure:
    """Acceptance lengths by minutes of training, a line for each kind of drafter."""
    fig, axes = panels(2, height=2.2, sharey=True)
    for panel, column in zip(axes, ("T=0", "T=1")):
        for name, shade in zip(
            dict.fromkeys(r["drafter"] for r in rows), (PUBLISHED, OURS, OTHERS)
        ):
            found = [r for r in rows if r["drafter"] == name]
            x, y = ([number(r[c]) for r in found] for c in ("minutes", column))
            panel.plot(x, y, label=name, color=shade, marker="o", markersize=4)
        panel.grid(axis="y", color="#e8e8ee")
        panel.set_xlim(left=0)
        finish(panel, f"tokens a pass in chains, {column}, by minutes of training")
    axes[0].legend(fontsize=7, frameon=False)
    return fig


def gemma(rows: list[Row]) -> Figure:
    """Acceptance lengths on HumanEval at T=0 and T=1."""
    fig, axes = panels(2, height=1.6)
    for panel, temperature in zip(axes, ("0", "1")):
        named = [r for r in rows if r["T"] == temperature and r["method"] != "plain"]
        bars(panel, f"HumanEval, T={temperature}: tokens a pass", plainly(named))
    return fig


def ngram(rows: list[Row]) -> Figure:
    """Speed-ups and acceptance lengths by benchmark, one request at a time."""
    fig, axes = panels(2, height=2.0)
    drafted = [r | {"method": f"{r['benchmark']}, T={r['T']}: {r['method']}"} for r in rows]
    ours = r"[^:]*: (ngram|redrafter)(, with [a-z ]+)?"
    named = [r for r in drafted if re.fullmatch(ours, r["method"])]
    for panel, (column, title) in zip(
        axes, {"speed-up": "times plain decoding", "acceptance length": "tokens a pass"}.items()
    ):
        bars(panel, title, [(name, x, OURS) for name, x, _ in chosen(named, column, bool)])
    return fig


DRAWN = {f.__name__: f for f in (gemma, small, dflash, tail, deer_ablations, markov_head, context)}
DRAWN |= {f.__name__: f for f in (pcllm, asarm, asarm_training, spiffy, spiffy_training, cspd)}
DRAWN |= {"minutes": minutes, "ngram": ngram, "redrafter": ngram}
# Those that are not of the first table of the page of their name: the page, and the text before.
ELSEWHERE = {f"{name}_training": (name, "\n### A real model") for name in ("asarm", "spiffy")}
ELSEWHERE |= {"minutes": ("drafter", "\n## By minutes of training")}


def main(argv: list[str]) -> None:
    """Draw the pictures of the pages that are named, or of all."""
    for name in argv or DRAWN:
        of, after = ELSEWHERE.get(name, (name, "\n## Figures"))
        page = (HERE.parent / "results" / f"{of}.md").read_text()
        fig = DRAWN[name](table(page, after))
        fig.savefig(HERE / f"{name}.png", dpi=110, metadata={"Software": None})


if __name__ == "__main__":
    main(sys.argv[1:])
