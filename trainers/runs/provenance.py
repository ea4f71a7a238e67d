"""The provenance of a run, written to its folder and into its model card."""

import json
import os
import platform
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import pytorch_lightning as pl
import torch
from huggingface_hub.constants import HF_HUB_CACHE
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import HFValidationError, validate_repo_id
from omegaconf import DictConfig, OmegaConf
from pytorch_lightning.utilities.rank_zero import rank_zero_only
from torch.utils.data import Dataset

from data.corpora.fingerprints import input_fingerprint
from data.files import atomic_write, read_json
from data.rows.packing import PackedRows
from recipes.command import typed

PACKAGES = ("torch", "transformers", "tokenizers", "pytorch-lightning", "datasets", "hydra-core")
# Settings that say where and how to run. Any other may name an input.
NO_INPUTS = ("command", "recipe", "scale", "strategy", "name", "runs", "logger", "trainer")


@rank_zero_only
def write_provenance(file: Path, start: dict, resumed: bool) -> None:
    """Write provenance.json: the first start of a run, and under 'resumed' every later one."""
    story = start
    if resumed and file.exists():
        story = read_json(file)
        story["resumed"] = [*story.get("resumed", []), start]
    with atomic_write(file) as temporary:
        temporary.write_text(json.dumps(story, indent=1))


def provenance(
    config: DictConfig, trainer: pl.Trainer, rows: dict[str, Dataset], first: int
) -> dict:
    """Gather the facts of one start of a run, at step `first`, with its packed rows by split."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "step": first,
        "command": typed("trainers.fit"),
        "git_commit": _git("rev-parse", "HEAD"),
        "git_dirty": bool(_git("status", "--porcelain")),
        "packages": {name: metadata.version(name) for name in PACKAGES},
        "python": platform.python_version(),
        "hardware": {
            "processor": platform.processor() or platform.machine(),
            "threads": torch.get_num_threads(),
            "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        },
        "trainer": {
            "world_size": trainer.world_size,
            "num_nodes": trainer.num_nodes,
            "devices": trainer.num_devices,
            "accelerator": type(trainer.accelerator).__name__,
            "strategy": type(trainer.strategy).__name__,
            "precision": trainer.precision,
        },
        "data": {split: described_rows(r) for split, r in rows.items()},
        "inputs": inputs(config),
    }


def described_rows(rows: Dataset) -> dict:
    """Return the number of rows and, for packed rows, their fingerprint and tokens."""
    if not isinstance(rows, PackedRows):
        return {"rows": len(rows)}
    tokens = rows.manifest["tokens"]
    return {"fingerprint": rows.folder.name, "rows": len(rows), "tokens": tokens}


def inputs(config: DictConfig) -> dict[str, str]:
    """Return the inputs that a run's config names: {path: fingerprint, cached Hub id: commit}."""
    settings = OmegaConf.to_container(config, resolve=True)
    for key in NO_INPUTS:
        settings.pop(key, None)
    settings["data"].pop("folder")  # its rows are fingerprinted one by one
    names = sorted(set(_strings(settings)))
    paths = [n for n in names if os.path.exists(n)]
    # A file of a folder that is named too, such as the mark of a complete one, is no other input.
    paths = [p for p in paths if not any(Path(q) in Path(p).parents for q in paths)]
    commits = {n: commit(n) for n in names if n not in paths}
    return {p: input_fingerprint(p) for p in paths} | {n: c for n, c in commits.items() if c}


def commit(name: str) -> str | None:
    """Return the commit of a Hub model's or data set's main branch in the local cache, if any."""
    try:
        validate_repo_id(name)
    except HFValidationError:  # a sentence, a command
        return None
    for kind in ("model", "dataset"):
        folder = repo_folder_name(repo_id=name, repo_type=kind)
        reference = Path(HF_HUB_CACHE, folder, "refs", "main")
        if reference.is_file():
            return reference.read_text().strip()
    return None


def _strings(node) -> Iterator[str]:
    if isinstance(node, str):
        yield node
    elif isinstance(node, (dict, list)):
        for item in node.values() if isinstance(node, dict) else node:
            yield from _strings(item)


def _git(*arguments: str) -> str | None:
    here = Path(__file__).parent
    done = subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None
