"""metrics.csv: the curve of a run, whole however often the run was stopped and resumed."""

import csv
import os
from pathlib import Path

from pytorch_lightning.loggers import Logger
from pytorch_lightning.utilities.rank_zero import rank_zero_only


class Curve(Logger):
    """Appends a row for every step that is logged; a new metric adds a column.

    first: how many steps the checkpoint has that the run goes on from. Rows of later steps are
    forgotten: they are computed again.
    """

    def __init__(self, file: Path, first: int = 0):
        super().__init__()
        self.file, self.columns = file, ["step"]
        if rank_zero_only.rank == 0:
            rows = [row for row in self._read() if int(row["step"]) <= first]
            self.columns = list(rows[0]) if rows else ["step"]
            self._write(rows)

    @property
    def name(self) -> str:
        """Unused: the file has a fixed place."""
        return ""

    @property
    def version(self) -> str:
        """Unused: the file has a fixed place."""
        return ""

    @rank_zero_only
    def log_hyperparams(self, *args, **kwargs) -> None:
        """The run's config.yaml holds them."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Append one row, on disk before the next step."""
        row = {**metrics, "step": int(step)}
        row.pop("epoch", None)  # steps are the unit
        new = sorted(k for k in row if k not in self.columns)
        if new:
            rows = self._read()
            self.columns += new
            self._write(rows)
        with self.file.open("a", newline="") as file:
            csv.DictWriter(file, self.columns).writerow(row)

    def _read(self) -> list[dict]:
        if not self.file.exists():
            return []
        with self.file.open(newline="") as file:
            # A row that a kill cut short has no step, or one that is not a number.
            return [r for r in csv.DictReader(file) if (r.get("step") or "").isdigit()]

    def _write(self, rows: list[dict]) -> None:
        temporary = self.file.with_suffix(".tmp")
        with temporary.open("w", newline="") as file:
            writer = csv.DictWriter(file, self.columns, extrasaction="ignore")
            writer.writeheader()
            writer.writerows(rows)
        os.replace(temporary, self.file)
