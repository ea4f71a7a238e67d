"""Draw docs/figures/scaling.png from the tables of docs/lab_notes/small.md.

python -m docs.figures.scaling
"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from docs.figures.tables import table

HERE = Path(__file__).parent
RESULTS = HERE.parent / "lab_notes" / "small.md"
PANELS = {"prompts": "prompts, same steps", "steps": "steps, same prompts"}
COLOURS = {"T=0": "#3f51b5", "T=1": "#e07b39"}


def draw(page: str, file: Path) -> None:
    """Draw acceptance length over prompts and over steps, a curve for each temperature."""
    fig, panels = plt.subplots(1, 2, figsize=(8, 2.8), sharey=True, layout="constrained")
    for axes, (column, title) in zip(panels, PANELS.items()):
        rows = table(page, f"\nBy {column}")
        at = [int(row[column].replace(",", "")) for row in rows]
        for temperature, colour in COLOURS.items():
            values, errors = zip(*(map(float, row[temperature].split("±")) for row in rows))
            axes.errorbar(at, values, errors, marker="o", color=colour, capsize=3, markersize=4)
            axes.annotate(
                temperature, (at[-1], values[-1]), (8, 0), textcoords="offset points", color=colour
            )
        axes.set_xscale("log", base=2)
        axes.set_xticks(at, [f"{n:,}" for n in at])
        axes.minorticks_off()
        axes.set_xlim(at[0] / 1.3, at[-1] * 1.6)
        axes.set_title(title, fontsize=9, loc="left")
        axes.grid(axis="y", color="#e8e8ee")
        axes.tick_params(labelsize=8, length=0)
        axes.spines[:].set_visible(False)
    panels[0].set_ylabel("acceptance length", fontsize=9)
    fig.savefig(file, dpi=110, metadata={"Software": None})


if __name__ == "__main__":
    draw(RESULTS.read_text(), HERE / "scaling.png")
