"""Draw docs/figures/speedup.png from the table of docs/results/deer.md.

python -m docs.figures.speedup
"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from docs.figures.tables import table

HERE = Path(__file__).parent
RESULTS = HERE.parent / "results" / "deer.md"
WAYS = {  # rows of the table, and how the picture names them
    "plain": "plain decoding",
    "transformers assisted": "transformers assisted",
    "transformers prompt lookup": "transformers prompt lookup",
    "deer, chain": "DEER as published",
    "deer, rejection": "DEER as published",
    "deer, block": "DEER, block verification",
    "deer, tree": "DEER, our noise-ranked tree",
}


def tokens_per_second(page: str, temperature: int) -> dict[str, float]:
    """Return tokens/s by sampler, of the table's rows at a temperature."""
    rows = table(page, "\n## Figures")
    found = [row for row in rows if row["T"] == str(temperature)]
    return {row["sampler"]: float(row["tokens/s"]) for row in found}


def draw(page: str, file: Path) -> None:
    """Draw two panels of bars: temperature 0 and 1."""
    fig, panels = plt.subplots(1, 2, figsize=(9, 2.6), layout="constrained")
    for axes, temperature in zip(panels, (0, 1)):
        found = tokens_per_second(page, temperature)
        ways = [way for way in WAYS if way in found][::-1]
        speeds = [found[way] for way in ways]
        colours = ["#3f51b5" if way.startswith("deer") else "#b0b6c8" for way in ways]
        colours[0] = "#e07b39"  # the tree, which is ours
        bars = axes.barh([WAYS[way] for way in ways], speeds, color=colours, height=0.7)
        axes.bar_label(bars, fmt="%.1f", padding=3, fontsize=8)
        axes.set_title(f"temperature {temperature}: tokens a second", fontsize=9, loc="left")
        axes.set_xlim(0, 1.12 * max(speeds))
        axes.tick_params(labelsize=8, length=0)
        axes.set_xticks([])
        axes.spines[:].set_visible(False)
    fig.savefig(file, dpi=110, metadata={"Software": None})


if __name__ == "__main__":
    draw(RESULTS.read_text(), HERE / "speedup.png")
