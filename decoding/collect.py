"""`python -m decoding.collect recipe=deer_answers`: collect teacher answers or trajectories.

A shard is written whole or not at all, and its rows depend only on the seed, and on the prompts'
ids and numbers. So a collection that is killed and restarted loses only the shard in progress, and
one that grows (a larger prompts.count, or a second time `minutes`) is the one that was collected at
once in that size. With a smaller count its first prompts are read. Several processes (torchrun)
share the shards. A prompt that cannot be answered is left out, and named in the manifest.
"""

import hashlib
import json
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import date
from itertools import islice
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from data.files import atomic_write, check_space, read_json, same_setting, shortened
from recipes.command import main
from recipes.compose import build, compose, run_folder
from recipes.folders import claimed
from recipes.inputs import check_first, prepare_inputs
from terminal.progress import Work

check_first(__name__, "collect")

import torch
from transformers import PreTrainedTokenizerBase

from data.corpora.answers import COMPLETE, PROMPTS, shard_path, with_turns
from data.corpora.sources import is_own
from data.text.chat import reads_clock
from data.text.prompts import TooFewPrompts, prompt_set
from data.text.rendering import dated
from data.text.tokenizer import same_tokenizer

MANIFEST = "manifest.json"  # the settings of a collection, in its folder
# Of its keys, those which older collections do not have, and the result.
ADDED, LEFT_OUT = ("weights", "prompt_ids", "date"), "left_out"
MOST_LEFT_OUT, FEW = 0.1, 8  # a larger share of the prompts, and as many, end a collection
NAMED = 20  # prompts that were left out, in the manifest
FIRST = 8  # prompts that a collection of so many minutes begins with, to know their rate
LeftOut = dict[str, tuple[str, bool]]  # why, and whether the prompt has no answer at all
Job = tuple[Sequence[dict], int]  # prompts of a shard, and the number of the first


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
    if config.minutes is not None and world > 1:
        raise ValueError(
            f"minutes={config.minutes:g} with {world} processes is not allowed: they would end at "
            "different prompts. Give prompts.count="
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
    began = time.monotonic()
    prepare_inputs(config.needs, config.build_inputs)
    collector = build(config.collector)
    manifest = {"recipe": config.recipe, "shard_size": config.shard_size, "seed": config.seed}
    manifest |= collector.made_with()
    if reads_clock(collector.tokenizer):
        manifest["date"] = _date(folder)
    needed = ("prompts", "shard_size")
    stored = read_json(folder / MANIFEST, needed) if _has_shards(folder) else {}
    with dated(manifest.get("date")):
        wanted: dict = OmegaConf.to_container(config.prompts, resolve=True)  # type: ignore[assignment]
        prompts, count, had = _read_prompts(wanted, collector.tokenizer, stored)
        # Which turns are asked is in `prompt_ids`, as these are.
        named = {name: value for name, value in wanted.items() if name != "turns"}
        manifest["prompts"] = named | {"count": len(prompts)}
        manifest["prompt_ids"], first, later = _fingerprints(islice(prompts, had or None))
        if stored:
            _check_settings(folder, stored, manifest, collector.tokenizer, first)
        if stored and len(prompts) > had:
            grown, _, later = _fingerprints(prompts)
            manifest = stored | {"prompts": manifest["prompts"], "prompt_ids": grown}
            print(f"{folder} has {had} prompts, and grows to {len(prompts)}")
        elif stored:
            manifest = stored
        if later:
            print(f"{later} later questions of chats are asked too (not with prompts.turns=first)")
        _Shards(config, folder, collector, prompts, count, manifest).collect(began)


def _read_prompts(
    asked: dict, tokenizer: PreTrainedTokenizerBase, stored: dict
) -> tuple[Sequence[dict], int, int]:
    """Return a collection's prompts, how many of them are asked for, and how many it had.

    They are those that are asked for, and those that the stored manifest has in addition. A file
    or folder of the user has as many as it has; another source has at least what is asked for.
    """
    had = stored["prompts"].get("count") if stored else 0  # null: all, in older ones
    source, count = asked["source"], asked["count"]
    most = None if None in (count, had) else max(count, had)
    given = {"turns": "all", **asked, "count": most}
    try:
        prompts: Sequence[dict] = prompt_set(tokenizer=tokenizer, **given)
    except TooFewPrompts as error:
        prompts = error.prompts
        sources = [source] if isinstance(source, str) else source
        if not prompts or (len(prompts) < (count or 0) and not any(map(is_own, sources))):
            raise
    found, count = len(prompts), count or len(prompts)
    if found < count:
        print(f"prompts.count={count}: all {found} prompts of {source} are taken")
    return prompts, min(count, found), found if had is None else had


class _Shards:
    """The shards of a collection, whose number i has the prompts from i * `size` on.

    Args:
        config: Of the command.
        folder: Of the collection.
        collector: Decodes.
        prompts: Those of the collection, at least as many as are asked for.
        count: How many are asked for: the first ones.
        manifest: Of the collection, which keeps the size of the shards that it began with.
    """

    def __init__(
        self,
        config: DictConfig,
        folder: Path,
        collector: Any,
        prompts: Sequence[dict],
        count: int,
        manifest: dict,
    ):
        self.config, self.folder, self.collector = config, folder, collector
        self.prompts, self.count, self.manifest = prompts, count, manifest
        self.size = manifest["shard_size"]

    def asked(self, i: int, skipped: int = 0) -> Sequence[dict]:
        """Return the prompts of a shard that are asked for, without the first `skipped`."""
        return self.prompts[i * self.size + skipped : min((i + 1) * self.size, self.count)]

    def collect(self, began: float) -> None:
        """Collect this process's share of what is missing; mark the collection if it is whole.

        It is also whole when `config.minutes` since `began` (by `time.monotonic`) are over: `count`
        is then what is answered.
        """
        config, folder, (rank, world) = self.config, self.folder, _rank()
        until = None if config.minutes is None else began + 60 * config.minutes
        done, left_out = self.stored()
        missing = [i for i, n in enumerate(done) if n < len(self.asked(i))]
        print(
            f"{config.recipe} at scale {config.scale}: {len(done) - len(missing)} of {len(done)} "
            f"shards are in {folder}"
        )
        mine = [i for i in missing if i % world == rank]
        left = [prompt for i in mine for prompt in self.asked(i, done[i])]
        check_space(folder, sum(_turns(p) * self.collector.bytes_of(p["prompt_ids"]) for p in left))
        count = sum(min(n, len(self.asked(i))) for i, n in enumerate(done))
        total = self.collector.number * sum(map(_turns, left)) if until is None else None
        jobs = self.jobs(mine, done, until)
        for (asked, first), rows in _collected(config.recipe, self.collector, jobs, total):
            left_out |= _left_out(self.collector.left_out, (row["id"] for row in rows))
            count += len(asked)
            _check_left_out(left_out, count, whole=False)
            _write_manifest(folder, self.manifest)
            i = first // self.size
            ids = [prompt["id"] for prompt in self.prompts[i * self.size : first + len(asked)]]
            _write_shard(shard_path(folder, i), rows, self.collector.left_out, ids)
        done, left_out = self.stored() if mine else (done, left_out)
        short = next((i for i, n in enumerate(done) if n < len(self.asked(i))), None)
        if short is not None and until is not None:
            self.count, short = short * self.size + done[short], None
            done, left_out = self.stored()
        if short is None:
            self.finish(left_out)

    def jobs(self, shards: list[int], done: list[int], until: float | None) -> Iterator[Job]:
        """Yield the prompts that shards lack, a shard at a time, or less where `until` is near.

        `done` is how many of its prompts each shard has.
        """
        rate = 0.0  # prompts a second, of the last job
        for i in shards:
            while asked := self.asked(i, done[i]):
                begun = time.monotonic()
                if until is not None:
                    if rate and begun >= until:
                        return
                    asked = asked[: max(FIRST, int(rate * (until - begun)))]
                yield asked, i * self.size + done[i]
                rate = len(asked) / (time.monotonic() - begun)
                done[i] += len(asked)

    def stored(self) -> tuple[list[int], LeftOut]:
        """Return how many of its prompts each shard has, and those that have no answer."""
        done, left_out = [], LeftOut()
        for i in range(-(-self.count // self.size)):
            if not (file := shard_path(self.folder, i)).exists():
                done.append(0)
                continue
            answered, told, ids = _read_notes(file)
            if ids is None:  # of an older shard: up to its last prompt that is known
                known, here = {*answered, *told}, self.prompts[i * self.size : (i + 1) * self.size]
                places = (n for n, prompt in enumerate(here, 1) if prompt["id"] in known)
                done.append(max(places, default=0))
            else:
                done.append(len(ids))
            if told:
                asked = {prompt["id"] for prompt in self.asked(i)}
                found = _left_out(told, answered)
                left_out |= {id: why for id, why in found.items() if id in asked}
        return done, left_out

    def finish(self, left_out: LeftOut) -> None:
        """Mark the collection as complete; write into its manifest, and say, what is left out."""
        folder, count = self.folder, self.count
        if left_out:
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
        shards = -(-count // self.size)
        complete = {"shards": shards}
        if count < len(self.prompts):
            complete |= {"prompts": count, "in_last": count - self.size * (shards - 1)}
            print(f"{folder}: the first {count} prompts are read from now on, also by training")
        else:
            print(f"{folder} has the answers to {count} prompts")
        _write_text(folder / COMPLETE, json.dumps(complete))


def _turns(prompt: dict) -> int:
    """Return how many questions a prompt's chat asks."""
    return 1 + len(prompt["later"]["at"][1:] if "later" in prompt else ())


def _collected(
    name: str, collector: Any, jobs: Iterable[Job], total: int | None
) -> Iterator[tuple[Job, list[dict]]]:
    """Yield each job with its rows; show tokens a second and the time left, within a job too.

    `total` is the number of answers, where it is known.
    """
    done = tokens = now = 0  # of whole jobs, and the answers of this one

    def within() -> tuple[float, str]:
        """Return how many answers the shard's tokens are worth, and the rate."""
        length = tokens / done if tokens else collector.most  # until there is a mean
        rate = collector.emitted / max(work.clock() - started, 1e-9)
        told = f"{rate:,.0f} tokens/s" if collector.emitted else ""
        return min((collector.emitted - tokens) / length, now), told

    with Work(name, total, "answers", within) as work:
        started = work.clock()
        for asked, first in jobs:
            now = collector.number * sum(map(_turns, asked))
            yield (asked, first), collector.collect(asked, first)
            done, tokens = done + now, collector.emitted
            work.advance(now)


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


def _read_notes(shard: Path) -> tuple[list[str], dict[str, str], list[str] | None]:
    """Return a shard's answered ids, why others have no answer, and its prompts (older: None)."""
    import pyarrow.parquet as parquet

    with parquet.ParquetFile(shard) as file:
        notes, names = file.schema_arrow.metadata or {}, file.schema_arrow.names
        told = json.loads(notes.get(LEFT_OUT.encode(), "{}"))
        ids = json.loads(notes[PROMPTS]) if PROMPTS in notes else None
        read = "id" in names and (told or ids is None)
        return file.read(["id"])["id"].to_pylist() if read else [], told, ids


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


def _check_settings(
    folder: Path, stored: dict, manifest: dict, tokenizer: PreTrainedTokenizerBase, first: str
) -> None:
    """Check that a folder's shards were collected with the same settings, of which is `stored`.

    `first` is the fingerprint of the prompts without later turns, as they once were.
    """
    stored, manifest = (_binding(found) for found in (stored, manifest))
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


def _binding(manifest: dict) -> dict:
    """Return what binds a collection: not its size, that of its shards, and what is left out."""
    found = {k: v for k, v in manifest.items() if k not in (LEFT_OUT, "shard_size")}
    named = {k: v for k, v in manifest.get("prompts", {}).items() if k != "count"}
    return json.loads(json.dumps(found | {"prompts": named}))


def _write_manifest(folder: Path, manifest: dict) -> None:
    """Write the settings just before the first shard, so that an early failure leaves no folder."""
    (folder / COMPLETE).unlink(missing_ok=True)  # until it is whole again
    if _has_shards(folder) and read_json(folder / MANIFEST) == manifest:
        return
    (folder / "shards").mkdir(parents=True, exist_ok=True)
    _write_text(folder / MANIFEST, json.dumps(manifest, indent=1))


def _has_shards(folder: Path) -> bool:
    return (folder / MANIFEST).exists() and any((folder / "shards").glob("[0-9]*"))


def _write_shard(file: Path, rows: list[dict], left_out: dict[str, str], ids: list[str]) -> None:
    """Write rows, and with them why prompts have none, and all prompts' ids.

    Rows of earlier prompts that are in the file stay, in the order of a shard collected at once.
    """
    import pyarrow
    import pyarrow.parquet as parquet

    table = pyarrow.Table.from_pylist(rows)
    if file.exists():
        before = with_turns(parquet.ParquetFile(file).read())
        left_out = _read_notes(file)[1] | left_out
        tables = [found for found in (before, table) if len(found)]
        table = pyarrow.concat_tables(tables, promote_options="permissive") if tables else table
        keys = [name for name in ("turn", "answer") if name in table.column_names]
        places = zip(*(table[name].to_pylist() for name in keys)) if len(table) else ()
        table = table.take([n for _, n in sorted((k, n) for n, k in enumerate(places))])
    notes: dict = {PROMPTS: json.dumps(ids)}
    if left_out:
        notes[LEFT_OUT] = json.dumps(left_out)
    table = table.replace_schema_metadata(notes)
    with atomic_write(file) as temporary:
        parquet.write_table(table, temporary)


def _write_text(file: Path, text: str) -> None:
    with atomic_write(file) as temporary:
        temporary.write_text(text)


if __name__ == "__main__":
    main(run)
