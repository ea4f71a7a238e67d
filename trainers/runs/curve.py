"""metrics.csv, the curve of a run: complete however often the run was stopped and resumed."""

import csv
import os
from pathlib import Path
from typing import NamedTuple

from pytorch_lightning.loggers import Logger
from pytorch_lightning.utilities.rank_zero import rank_zero_only

from data.files import atomic_write, named


def read_curve(file: Path) -> list[dict[str, str]]:
    """Read the logged rows of a metrics.csv, '' where nothing was logged; skip other lines."""
    if not file.exists():
        return []
    with file.open(newline="", encoding="utf-8", errors="replace") as lines:
        whole = [line for line in lines if line.endswith("\n")]  # else a kill cut it short
    return [row for row in csv.DictReader(whole) if (row.get("step") or "").isdigit()]


class Measured(NamedTuple):
    """A metric's value, with 4 digits, and the step that it was measured at."""

    value: float
    step: int


def latest(file: Path, step: int | None = None) -> dict[str, Measured]:
    """Return the last value of each metric in a metrics.csv, up to a step if one is given."""
    found: dict[str, Measured] = {}
    for row in read_curve(file):
        number = int(row.pop("step"))
        if step is None or number <= step:
            found |= {k: Measured(float(f"{float(x):.4g}"), number) for k, x in row.items() if x}
    return found


class Curve(Logger):
    """The logger that appends a row to metrics.csv for every logged step.

    A new metric adds a column. The first logged row removes those of steps after `first`, which the
    run resumes from: they are computed again.
    """

    def __init__(self, file: Path, first: int = 0):
        super().__init__()
        self.file, self.first = file, first
        self.columns: list[str] = []

    @property
    def name(self) -> str:
        return ""  # the file's path is fixed

    version = name

    @rank_zero_only
    def log_hyperparams(self, *args, **kwargs) -> None:
        """Do nothing: the run's config.yaml holds them."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        """Append one row, which is on disk before the next step."""
        if not self.columns:
            rows = [r for r in read_curve(self.file) if int(r["step"]) <= self.first]
            self.columns = list(rows[0]) if rows else ["step"]
            self._write(rows)
        row = {**metrics, "step": int(step)}
        row.pop("epoch", None)  # steps are the unit
        new = sorted(k for k in row if k not in self.columns)
        if new:
            rows = read_curve(self.file)
            self.columns += new
            self._write(rows)
        with named(self.file), self.file.open("a", newline="") as file:
            csv.DictWriter(file, self.columns).writerow(row)
            file.flush()
            os.fsync(file.fileno())

    def _write(self, rows: list[dict]) -> None:
        with atomic_write(self.file) as temporary, temporary.open("w", newline="") as file:
            writer = csv.DictWriter(file, self.columns, extrasaction="ignore")
            writer.writeheader()
            writer.writerows(rows)
