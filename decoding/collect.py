"""`python -m decoding.collect recipe=deer_answers`: collect teacher answers or trajectories.

A shard is written whole or not at all, and its rows depend on the seed and the prompts' ids only.
So a collection that is killed and started again loses only the shard that was in work. Several
processes (torchrun) share the shards.
"""

import inspect
import json
import os
from pathlib import Path

import torch
from omegaconf import DictConfig, OmegaConf

from data.corpora.answers import shard_path
from data.corpora.sources import load_documents
from data.files import atomic_write, check_space, read_json, same_setting
from data.text.prompts import prompt_set
from decoding.commands.claim import claimed
from decoding.commands.cli import main, quiet
from decoding.commands.inputs import prepare_inputs
from decoding.commands.progress import track
from decoding.commands.recipes import build, check_arguments, compose, run_folder

MANIFEST = "manifest.json"  # the settings of a collection, in its folder


def run(argv: list[str]) -> None:
    """Run the command with its arguments `key=value`."""
    quiet()
    collect(compose(argv, "collect"))


def collect(config: DictConfig) -> Path:
    """Collect the shards that a collection still lacks.

    Args:
        config: A composed recipe of `collect` (`decoding.commands.recipes.compose`).

    Returns:
        The collection's folder, `<runs>/<recipe>/<name>`.

    Raises:
        ValueError: The folder was collected with other settings, or the disk is too small.
    """
    _check_prompt_keys(OmegaConf.to_container(config.prompts, resolve=True))
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
    """Collect this process's share of the shards that a folder lacks."""
    prepare_inputs(config)
    collector = build(config.collector)
    prompts = prompt_set(tokenizer=collector.tokenizer, **config.prompts)
    manifest = {
        "recipe": config.recipe,
        "prompts": dict(config.prompts),
        "shard_size": config.shard_size,
        "seed": config.seed,
        **collector.made_with(),
    }
    size = config.shard_size
    shards = range(0, len(prompts), size)  # the first prompt of each
    _check_settings(folder, manifest)
    missing = [i for i in range(len(shards)) if not shard_path(folder, i).exists()]
    done = len(shards) - len(missing)
    print(
        f"{config.recipe} at scale {config.scale}: {done} of {len(shards)} shards are in {folder}"
    )
    missing = [i for i in missing if i % world == rank]
    check_space(
        folder,
        sum(
            collector.bytes_of(p["prompt_ids"])
            for i in missing
            for p in prompts[shards[i] : shards[i] + size]
        ),
    )
    for i in track(missing, config.recipe):
        rows = collector.collect(prompts[shards[i] : shards[i] + size])
        _write_manifest(folder, manifest)
        _write_shard(shard_path(folder, i), rows)
    if all(shard_path(folder, i).exists() for i in range(len(shards))):
        _write_text(folder / "complete.json", json.dumps({"shards": len(shards)}))


def _check_prompt_keys(prompts: dict) -> None:
    """Refuse wrong and missing keys of a prompt set, before hours go into building an input.

    Args:
        prompts: Its values by name, without references.
    """
    known = {}
    for taker in (prompt_set, load_documents):
        known = {**inspect.signature(taker).parameters, **known}
    del known["tokenizer"], known["options"]
    for p in inspect.signature(prompt_set).parameters.values():
        if p.name in known and p.default is p.empty and p.name not in prompts:
            raise ValueError(f"prompts.{p.name} is missing")
    check_arguments(prompts, known.values(), "prompts.")


def _check_settings(folder: Path, manifest: dict) -> None:
    """Check that a folder's shards were collected with the same settings."""
    if not _has_shards(folder):
        return
    stored, manifest = read_json(folder / MANIFEST), json.loads(json.dumps(manifest))
    keys = sorted({*stored, *manifest})
    changed = [k for k in keys if not same_setting(stored.get(k), manifest.get(k))]
    if changed:
        k = changed[0]
        raise ValueError(
            f"{folder} was collected with other settings ({k}: {stored.get(k)}, now "
            f"{manifest.get(k)}): give another name=..., or remove the folder"
        )


def _write_manifest(folder: Path, manifest: dict) -> None:
    """Write the settings before the first shard: a teacher that never answers leaves no folder."""
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
