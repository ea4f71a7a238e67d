"""What tests compare of runs, and a run as a kill leaves it."""

import shutil
from pathlib import Path

import pyarrow.parquet as parquet
import torch
from safetensors.torch import load_file

from trainers.runs.checkpoint_files import checkpoint_files, step_of
from trainers.runs.curve import read_curve


def curve(folder: Path, column: str = "loss") -> dict[int, float]:
    """A column of metrics.csv by step."""
    rows = read_curve(folder / "metrics.csv")
    return {int(r["step"]): float(r[column]) for r in rows if r[column]}


def weights(export: Path) -> dict[str, torch.Tensor]:
    """The tensors of an export."""
    return load_file(export / "model.safetensors")


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Whether tensors are the same, bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def same_weights(a: Path, b: Path) -> bool:
    """Whether two runs have exported the same, bit for bit."""
    return same(weights(a / "export"), weights(b / "export"))


def same_run(a: Path, b: Path) -> bool:
    """Whether two runs have the same weights, bit for bit, and the same metrics, byte for byte."""
    one, other = ((f / "metrics.csv").read_bytes() for f in (a, b))
    return same_weights(a, b) and one == other


def kept(folder: Path) -> list[int]:
    """The steps of a run's checkpoints, whole ones all."""
    return [step_of(path) for path in checkpoint_files(folder / "checkpoints")]


def cut(whole: Path, name: str, step: int) -> Path:
    """A copy of a run as if it had been killed after the checkpoint of a step; its folder."""
    copy = whole.with_name(name)
    shutil.copytree(whole, copy)
    shutil.rmtree(copy / "export")
    config = (copy / "config.yaml").read_text()
    (copy / "config.yaml").write_text(config.replace(f"name: {whole.name}\n", f"name: {name}\n"))
    for path in checkpoint_files(copy / "checkpoints"):
        if step_of(path) > step:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return copy


def rows(folder: Path) -> list[dict]:
    """The rows of a collection's shards."""
    return [
        r for s in sorted((folder / "shards").glob("*")) for r in parquet.read_table(s).to_pylist()
    ]
