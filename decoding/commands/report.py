"""Results of benches: a folder, whole or not at all; tables on the screen and as CSV; pictures."""

import csv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from data.files import atomic_write, delete, hidden_sibling, put_in_place
from decoding.commands.cli import typed

WIDTH = 150  # characters of a table that goes to a file or a pipe


@contextmanager
def results(folder: Path) -> Iterator[Path]:
    """A context whose files come into a folder at the block's end, and are named on the screen.

    Measure inside: a folder that cannot be written to is an error before the work, and where the
    block raises, the folder is as before.

    Args:
        folder: Where the results go, over those of the same names.

    Yields:
        A hidden folder within it to write into.
    """
    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    hidden = hidden_sibling(folder / "results")
    hidden.mkdir()
    try:
        yield hidden
        names = sorted(path.name for path in hidden.iterdir())
        for name in names:
            put_in_place(hidden / name, folder / name)
        print(f"wrote {', '.join(names)} into {folder}")
    finally:
        delete(hidden)
        if made and not any(folder.iterdir()):
            folder.rmdir()


def write_table(
    lines: list[dict], file: Path, title: str, command: str, shown: list[dict] | None = None
) -> None:
    """Print lines as a table, and write them to a CSV file with `command.txt` beside it.

    Args:
        lines: The lines by column, all with the same keys.
        file: The CSV file.
        title: Of the table on the screen.
        command: The module that runs, for command.txt, which repeats the measurement.
        shown: The lines on the screen, where they differ from those in the file.
    """
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title)
    shown = shown or lines
    for key, value in shown[0].items():
        first = not table.columns  # the name of a line is not broken into pieces
        table.add_column(key, justify="left" if isinstance(value, str) else "right", no_wrap=first)
    for line in shown:
        table.add_row(*map(str, line.values()))
    Console(width=None if Console().is_terminal else WIDTH).print(table)
    with file.open("w", newline="") as out:
        writer = csv.DictWriter(out, lines[0])
        writer.writeheader()
        writer.writerows(lines)
    (file.parent / "command.txt").write_text(typed(command))


@contextmanager
def picture(file: Path, **layout) -> Iterator:
    """A context with matplotlib axes to draw on, written to a PNG file at its end without a screen.

    Args:
        file: The PNG file.
        layout: Arguments of `plt.subplots`.

    Yields:
        Axes [rows, columns].
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(squeeze=False, **layout)
    try:
        yield axes
        for axis in axes.flat:
            axis.spines[["top", "right"]].set_visible(False)
        figure.tight_layout()
        file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(file) as temporary:
            figure.savefig(temporary, dpi=150, format="png")
    finally:
        plt.close(figure)
