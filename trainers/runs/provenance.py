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
from omegaconf import DictConfig, OmegaConf
from pytorch_lightning.utilities.rank_zero import rank_zero_only
from torch import nn
from torch.utils.data import Dataset, Subset

from data.corpora.fingerprints import VERSION, commit, input_fingerprint
from data.corpora.sources import content_fingerprint
from data.files import atomic_write, read_json
from data.rows.packing import PackedRows
from models.sizes import Layers
from recipes.command import typed
from recipes.values import check

PACKAGES = ("torch", "transformers", "tokenizers", "pytorch-lightning", "datasets", "hydra-core")
PARTS = ("content", "tokenizer")  # of what rows are made from: those that a path does not tell
# Settings that say where and how to run. Any other may name an input.
NO_INPUTS = (
    "command", "recipe", "scale", "strategy", "name", "runs", "logger", "trainer", "resume",
)  # fmt: skip


@rank_zero_only
def write_provenance(file: Path, start: dict, resumed: bool) -> None:
    """Write provenance.json: the first start of a run, and under 'resumed' every later one."""
    story = start
    if resumed and file.exists():
        story = read_json(file)
        story["resumed"] = [*story.get("resumed", []), start]
    with atomic_write(file) as temporary:
        temporary.write_text(json.dumps(story, indent=1))


def check_inputs(start: dict, checkpoint: Path, chosen: bool) -> None:
    """Compare the inputs of a start with its checkpoint's run's, by their fingerprints.

    Other rows, models, collections or files are a ValueError; where the checkpoint was `chosen` by
    the user (resume=PATH), they are only named. A folder of another kind may be more than what is
    read of it, so its rows alone are compared.
    """
    before = _last_start(checkpoint.parent.parent)
    if before is None:
        return
    changed = []
    for split, now in start["data"].items():
        then = before.get("data", {}).get(split, {})
        if then.get("fingerprint") != now.get("fingerprint"):
            parts = [part for part in PARTS if then.get(part) != now.get(part)] or ["fingerprint"]
            changed += [f"{p} of data.{split}: {then.get(p)}, now {now.get(p)}" for p in parts]
    changed += _changed_inputs(before, start["inputs"])
    if not changed:
        return
    what = f"{checkpoint} was trained on other inputs ({'; '.join(changed)})"
    if not chosen:
        raise ValueError(
            f"{what}: give another name=..., resume={checkpoint} to go on with these, or "
            "resume=never to start anew"
        )
    rank_zero_only(print)(f"{what}: going on with these")


def check_finished(config: DictConfig, folder: Path) -> None:
    """Compare the inputs of a finished run in a folder with what they are now.

    Others are a ValueError. Nothing is built: of rows the local source is compared, and an input
    that is gone tells nothing.
    """
    before = _last_start(folder)
    if before is None:
        return
    changed = _changed_inputs(before, inputs(config))
    for split, rows in before.get("data", {}).items():
        source, then = config.data[split].get("source"), rows.get("content")
        if isinstance(source, str) and isinstance(then, str) and os.path.exists(source):
            now = content_fingerprint(source, config.data.folder)
            if then != now:
                changed.append(f"content of data.{split}: {then}, now {now}")
    if changed:
        raise ValueError(
            f"{folder} holds a finished run of other inputs ({'; '.join(changed)}): give another "
            "name=..., or start anew with resume=never"
        )


def chosen_layers(folder: Path) -> list[int] | None:
    """Return the layers of its source that a run's network was made of; None for no such run."""
    layers = (_last_start(folder) or {}).get("layers")
    return None if layers is None else [*check("layers", layers, list[Layers])]


def _last_start(folder: Path) -> dict | None:
    """Return the last start in a run's provenance; None without one that can be compared."""
    file = folder / "provenance.json"
    if not file.is_file():
        return None
    story = read_json(file)
    before = [story, *story.get("resumed", [])][-1]
    return before if before.get("fingerprints") == VERSION else None


def _changed_inputs(before: dict, found: dict[str, str]) -> list[str]:
    """Return what is to say of models, collections and files that have other fingerprints now."""
    then = before.get("inputs", {})
    changed = {name: now for name, now in found.items() if then.get(name, now) != now}
    return [f"{n}: {then[n]}, now {now}" for n, now in changed.items() if _is_one_input(Path(n))]


def _is_one_input(path: Path) -> bool:
    """Return whether a path is an input as a whole: a file, a model, a collection, a Hub id."""
    known = ("config.json", "manifest.json", "adapter_config.json")
    return not path.is_dir() or any((path / name).is_file() for name in known)


def provenance(
    config: DictConfig,
    network: nn.Module,
    trainer: pl.Trainer,
    rows: dict[str, Dataset],
    first: int,
) -> dict:
    """Gather the facts of one start of a run, at step `first`, with its packed rows by split."""
    copied = getattr(network, "copied", None)
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
        "fingerprints": VERSION,
        "data": {split: described_rows(r) for split, r in rows.items()},
        "inputs": inputs(config),
        "layers": copied and copied.layers,
    }


def described_rows(rows: Dataset) -> dict:
    """Return the number of rows, their fingerprint, if any, and the tokens of packed ones."""
    whole = rows.dataset if isinstance(rows, Subset) else rows
    known = {"fingerprint": getattr(whole, "fingerprint", None), "rows": len(rows)}
    if isinstance(rows, PackedRows):
        known["tokens"] = rows.manifest["tokens"]
        made_from = rows.manifest["fingerprint"]
        known |= {part: made_from[part] for part in PARTS if part in made_from}
    return {key: value for key, value in known.items() if value is not None}


def inputs(config: DictConfig) -> dict[str, str]:
    """Return the inputs that a run's config names: {path: fingerprint, cached Hub id: commit}."""
    settings = OmegaConf.to_container(config, resolve=True)
    for key in NO_INPUTS:
        settings.pop(key, None)
    settings["data"].pop("folder")  # its rows are fingerprinted one by one
    settings.get("module", {}).pop("traces", None)  # a cache, whose keys are fingerprints
    names = sorted(set(_strings(settings)))
    paths = [n for n in names if os.path.isfile(n) or os.path.isdir(n)]  # a device has no end
    # A file of a folder that is named too, such as the mark of a complete one, is no other input.
    paths = [p for p in paths if not any(Path(q) in Path(p).parents for q in paths)]
    commits = {n: commit(n) for n in names if n not in paths}
    return {p: input_fingerprint(p) for p in paths} | {n: c for n, c in commits.items() if c}


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
