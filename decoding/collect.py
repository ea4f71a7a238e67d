"""`python -m decoding.collect recipe=deer_answers`: collect teacher answers or trajectories.

A shard is written whole or not at all, and its rows depend only on the seed and the prompts' ids.
So a collection that is killed and restarted loses only the shard in progress. Several processes
(torchrun) share the shards. A prompt that cannot be answered is left out, and named in the
manifest.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from data.files import atomic_write, check_space, read_json, same_setting, shortened
from decoding.report import track
from recipes.command import main
from recipes.compose import build, compose, run_folder
from recipes.folders import claimed
from recipes.inputs import check_first, prepare_inputs

check_first(__name__, "collect")

import torch
from transformers import PreTrainedTokenizerBase

from data.corpora.answers import shard_path
from data.text.chat import reads_clock
from data.text.prompts import prompt_set
from data.text.rendering import dated
from data.text.tokenizer import same_tokenizer

MANIFEST = "manifest.json"  # the settings of a collection, in its folder
# Of its keys, those which older collections do not have, and the result.
ADDED, LEFT_OUT = ("weights", "prompt_ids", "date"), "left_out"
MOST_LEFT_OUT, FEW = 0.1, 8  # a larger share of the prompts, and as many, end a collection
NAMED = 20  # prompts that were left out, in the manifest
LeftOut = dict[str, tuple[str, bool]]  # why, and whether the prompt has no answer at all


def run(argv: list[str]) -> None:
    """Run the command with its arguments `key=value`."""
    collect(compose(argv, "collect"))


def collect(config: DictConfig) -> Path:
    """Collect the missing shards of a composed recipe; return the folder, `<runs>/<recipe>/<name>`.

    Raises ValueError if it was collected with other settings, or the disk is too small.
    """
    _, world = _rank()
    if config.device_map is not None and world > 1:
        raise ValueError(
            f"device_map={config.device_map} with {world} processes is not allowed: every process "
            "would spread its own teacher over the same devices. Start one, without torchrun"
        )
    if torch.cuda.is_available():  # 'cuda' is then the GPU of this process
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    folder = run_folder(config)
    with claimed(folder):
        _collect(config, folder)
    return folder


def _rank() -> tuple[int, int]:
    """Return the number of this process, and how many there are."""
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def _collect(config: DictConfig, folder: Path) -> None:
    """Prepare what is asked, check it against the folder, and collect it."""
    prepare_inputs(config.needs, config.build_inputs)
    collector = build(config.collector)
    manifest = {name: config[name] for name in ("recipe", "shard_size", "seed")}
    asked = {"turns": "all", **config.prompts}
    # Which turns are asked is in `prompt_ids`, as these are.
    named = {name: value for name, value in config.prompts.items() if name != "turns"}
    manifest |= {"prompts": named, **collector.made_with()}
    if reads_clock(collector.tokenizer):
        manifest["date"] = _date(folder)
    with dated(manifest.get("date")):
        prompts = prompt_set(tokenizer=collector.tokenizer, **asked)
        manifest["prompt_ids"], first, later = _fingerprints(prompts)
        _check_settings(folder, manifest, collector.tokenizer, first)
        if later:
            print(f"{later} later questions of chats are asked too (not with prompts.turns=first)")
        _collect_shards(config, folder, collector, prompts, manifest, later > 0)


def _collect_shards(
    config: DictConfig,
    folder: Path,
    collector: Any,
    prompts: Sequence[dict],
    manifest: dict,
    in_turns: bool,
) -> None:
    """Collect this process's share of the missing shards; `in_turns`: of chats with later turns."""
    rank, world = _rank()
    size = config.shard_size
    shards = [prompts[i : i + size] for i in range(0, len(prompts), size)]
    missing = [i for i in range(len(shards)) if not shard_path(folder, i).exists()]
    done = f"{len(shards) - len(missing)} of {len(shards)} shards are in {folder}"
    print(f"{config.recipe} at scale {config.scale}: {done}")
    mine = [i for i in missing if i % world == rank]
    sizes = (
        (1 + len(p["later"]["at"][1:] if "later" in p else ()))
        * collector.bytes_of(p["prompt_ids"])
        for i in mine
        for p in shards[i]
    )
    check_space(folder, sum(sizes))
    left_out = _stored_left_out(folder, len(shards))
    count = size * (len(shards) - len(missing))
    for i in track(mine, config.recipe):
        rows = collector.collect(shards[i])
        left_out |= _left_out(collector.left_out, (row["id"] for row in rows))
        count += len(shards[i])
        _check_left_out(left_out, count, whole=False)
        if not in_turns:  # as collections of prompts without turns have it
            for row in rows:
                del row["turn"]
        _write_manifest(folder, manifest)
        _write_shard(shard_path(folder, i), rows, collector.left_out)
    if all(shard_path(folder, i).exists() for i in range(len(shards))):
        _finish(folder, len(shards), len(prompts))


def _fingerprints(prompts: Iterable[dict]) -> tuple[str, str, int]:
    """Return fingerprints of the prompts, and how many later questions their chats have.

    The first covers their ids, their tokens and the later turns; the second leaves out the turns.
    """
    found, first, count = hashlib.sha256(), hashlib.sha256(), 0
    for prompt in prompts:
        asked, later = [prompt["id"], prompt["prompt_ids"]], prompt.get("later")
        first.update(json.dumps(asked).encode())
        found.update(json.dumps([*asked, later] if later else asked).encode())
        count += len(later["at"]) - 1 if later else 0
    return found.hexdigest()[:16], first.hexdigest()[:16], count


def _date(folder: Path) -> str:
    """Return the day on which the collection was begun, which is today's in its chats."""
    stored = read_json(folder / MANIFEST) if _has_shards(folder) else {}
    return str(stored.get("date") or date.today().isoformat())


def _stored_left_out(folder: Path, shards: int) -> LeftOut:
    """Return the prompts that are left out of the shards that are there."""
    import pyarrow.parquet as parquet

    found: LeftOut = {}
    for shard in filter(Path.exists, (shard_path(folder, i) for i in range(shards))):
        with parquet.ParquetFile(shard) as file:
            told = (file.schema_arrow.metadata or {}).get(LEFT_OUT.encode())
            if told:
                names = file.schema_arrow.names
                ids = file.read(["id"])["id"].to_pylist() if "id" in names else []
                found |= _left_out(json.loads(told), ids)
    return found


def _left_out(reasons: dict[str, str], answered: Iterable[str]) -> LeftOut:
    """Return reasons, and whether a prompt has no answer at all: a later turn's may be missing."""
    whole = {*reasons} - {*answered}
    return {id: (why, id in whole) for id, why in reasons.items()}


def _check_left_out(left_out: LeftOut, count: int, whole: bool) -> None:
    """Raise ValueError where more than a share of `count` prompts has no answer.

    `whole`: these are all prompts, and there must be an answer.
    """
    without = sum(none for _, none in left_out.values())
    if (whole and without == count) or (without >= FEW and without > MOST_LEFT_OUT * count):
        raise ValueError(
            f"{without} of {count} prompts cannot be answered, more than can be left out: "
            f"{_named(left_out)}"
        )


def _named(left_out: LeftOut) -> str:
    """Return the first of the prompts that are left out with its reason, and the next ones' ids."""
    (first, (why, _)), *others = left_out.items()
    ids = ", ".join(shortened(id) for id, _ in others[:5])
    return f"{shortened(first)} ({why[:200]})" + (f", {ids}" if ids else "")


def _finish(folder: Path, shards: int, count: int) -> None:
    """Mark a collection as complete; write into its manifest, and say, what is left out."""
    if left_out := _stored_left_out(folder, shards):
        _check_left_out(left_out, count, whole=True)
        print(
            f"{len(left_out)} of {count} prompts, or later questions of theirs, are left out: "
            f"{_named(left_out)}"
        )
        named = {shortened(id): why[:200] for id, (why, _) in [*left_out.items()][:NAMED]}
        manifest = read_json(folder / MANIFEST)
        noted = manifest | {LEFT_OUT: {"count": len(left_out), "named": named}}
        if noted != manifest:
            _write_text(folder / MANIFEST, json.dumps(noted, indent=1))
    _write_text(folder / "complete.json", json.dumps({"shards": shards}))


def _check_settings(
    folder: Path, manifest: dict, tokenizer: PreTrainedTokenizerBase, first: str
) -> None:
    """Check that a folder's shards were collected with the same settings.

    `first` is the fingerprint of the prompts without later turns, as they once were.
    """
    if not _has_shards(folder):
        return
    stored, manifest = read_json(folder / MANIFEST), json.loads(json.dumps(manifest))
    stored.pop(LEFT_OUT, None)
    if manifest["prompt_ids"] != first == stored.get("prompt_ids", first):
        raise ValueError(
            f"{folder} has the answers to the first question of each chat, and now all are asked: "
            "give prompts.turns=first to go on, or another name=..."
        )
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


def _write_shard(file: Path, rows: list[dict], left_out: dict[str, str]) -> None:
    """Write rows, and with them why prompts have none."""
    import pyarrow
    import pyarrow.parquet as parquet

    table = pyarrow.Table.from_pylist(rows)
    if left_out:
        table = table.replace_schema_metadata({LEFT_OUT: json.dumps(left_out)})
    with atomic_write(file) as temporary:
        parquet.write_table(table, temporary)


def _write_text(file: Path, text: str) -> None:
    with atomic_write(file) as temporary:
        temporary.write_text(text)


if __name__ == "__main__":
    main(run)
