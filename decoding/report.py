"""Results of long commands: a folder written whole or not at all, tables and pictures."""

import csv
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from data.files import atomic_write, delete, hidden_sibling, put_in_place
from recipes.command import typed

WIDTH = 150  # characters of a table that goes to a file or a pipe


@contextmanager
def results(folder: Path) -> Iterator[Path]:
    """Open a hidden folder whose files move to `folder` and are listed at the block's end.

    Measure inside: a folder that cannot be written to is then an error before the work. If the
    block raises, the folder stays as before.
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


def counted(number: int, name: str) -> str:
    """Return a number of things in words.

    >>> counted(1, "prompt"), counted(8, "prompt")
    ('1 prompt', '8 prompts')
    """
    return f"{number} {name}{'' if number == 1 else 's'}"


def write_table(
    lines: list[dict], file: Path, title: str, command: str, shown: list[dict] | None = None
) -> None:
    """Print lines (or `shown` in their place) as a table, and write them to a CSV file.

    `command.txt` next to it repeats the measurement by `command`, the module that runs. All lines
    have the same keys, the columns.
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


@cache
def draws() -> bool:
    """Return whether pictures can be drawn; say once, in a line, what draws them if not."""
    if find_spec("matplotlib") is not None:
        return True
    print("no pictures are drawn: they need pip install matplotlib")
    return False


@contextmanager
def picture(file: Path, **layout) -> Iterator:
    """Yield matplotlib axes [rows, columns] of `plt.subplots(**layout)`, then write a PNG file."""
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
