"""`python -m decoding.collect recipe=deer_answers`: collect teacher answers or trajectories.

A shard is written whole or not at all, and its rows depend only on the seed and the prompts' ids.
So a collection that is killed and restarted loses only the shard in progress. Several processes
(torchrun) share the shards.
"""

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path

import torch
from omegaconf import DictConfig
from transformers import PreTrainedTokenizerBase

from data.corpora.answers import shard_path
from data.files import atomic_write, check_space, read_json, same_setting
from data.text.prompts import prompt_set
from data.text.tokenizer import same_tokenizer
from decoding.report import track
from recipes.command import main
from recipes.compose import build, compose, run_folder
from recipes.folders import claimed
from recipes.inputs import prepare_inputs

MANIFEST = "manifest.json"  # the settings of a collection, in its folder
ADDED = ("weights", "prompt_ids")  # its fingerprints, which older collections do not have


def run(argv: list[str]) -> None:
    """Run the command with its arguments `key=value`."""
    collect(compose(argv, "collect"))


def collect(config: DictConfig) -> Path:
    """Collect the missing shards of a composed recipe; return the folder, `<runs>/<recipe>/<name>`.

    Raises ValueError if it was collected with other settings, or the disk is too small.
    """
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if config.device_map is not None and world > 1:
        raise ValueError(
            f"device_map={config.device_map} with {world} processes is not allowed: every process "
            "would spread its own teacher over the same devices. Start one, without torchrun"
        )
    if torch.cuda.is_available():  # 'cuda' is then the GPU of this process
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    folder = run_folder(config)
    with claimed(folder):
        _collect(config, folder, rank, world)
    return folder


def _collect(config: DictConfig, folder: Path, rank: int, world: int) -> None:
    """Collect this process's share of the missing shards."""
    prepare_inputs(config.needs, config.build_inputs)
    collector = build(config.collector)
    prompts = prompt_set(tokenizer=collector.tokenizer, **config.prompts)
    manifest = {name: config[name] for name in ("recipe", "shard_size", "seed")}
    manifest |= {"prompts": dict(config.prompts), **collector.made_with()}
    manifest["prompt_ids"] = _fingerprint(prompts)
    _check_settings(folder, manifest, collector.tokenizer)
    size = config.shard_size
    shards = [prompts[i : i + size] for i in range(0, len(prompts), size)]
    missing = [i for i in range(len(shards)) if not shard_path(folder, i).exists()]
    done = f"{len(shards) - len(missing)} of {len(shards)} shards are in {folder}"
    print(f"{config.recipe} at scale {config.scale}: {done}")
    missing = [i for i in missing if i % world == rank]
    sizes = (collector.bytes_of(p["prompt_ids"]) for i in missing for p in shards[i])
    check_space(folder, sum(sizes))
    for i in track(missing, config.recipe):
        rows = collector.collect(shards[i])
        _write_manifest(folder, manifest)
        _write_shard(shard_path(folder, i), rows)
    if all(shard_path(folder, i).exists() for i in range(len(shards))):
        _write_text(folder / "complete.json", json.dumps({"shards": len(shards)}))


def _fingerprint(prompts: Iterable[dict]) -> str:
    """Return a fingerprint of the prompts: their ids, and their tokens."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(json.dumps([prompt["id"], prompt["prompt_ids"]]).encode())
    return digest.hexdigest()[:16]


def _check_settings(folder: Path, manifest: dict, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that a folder's shards were collected with the same settings."""
    if not _has_shards(folder):
        return
    stored, manifest = read_json(folder / MANIFEST), json.loads(json.dumps(manifest))
    if same_tokenizer(tokenizer, str(stored.get("tokenizer"))):  # of an older version too
        manifest["tokenizer"] = stored["tokenizer"]
    for key in sorted({*stored, *manifest}):
        before, now = stored.get(key), manifest.get(key)
        unknown = key in ADDED and key not in stored
        if not unknown and not same_setting(before, now):
            raise ValueError(
                f"{folder} was collected with other settings ({key}: {before}, now {now}): give "
                "another name=..., or remove the folder"
            )


def _write_manifest(folder: Path, manifest: dict) -> None:
    """Write the settings just before the first shard, so that an early failure leaves no folder."""
    if _has_shards(folder):
        return
    (folder / "shards").mkdir(parents=True, exist_ok=True)
    _write_text(folder / MANIFEST, json.dumps(manifest, indent=1))


def _has_shards(folder: Path) -> bool:
    return (folder / MANIFEST).exists() and any((folder / "shards").glob("[0-9]*"))


def _write_shard(file: Path, rows: list[dict]) -> None:
    import pyarrow
    import pyarrow.parquet as parquet

    table = pyarrow.Table.from_pylist(rows)
    with atomic_write(file) as temporary:
        parquet.write_table(table, temporary)


def _write_text(file: Path, text: str) -> None:
    with atomic_write(file) as temporary:
        temporary.write_text(text)


if __name__ == "__main__":
    main(run)
