"""Collections of teacher answers on disk: Parquet shards keyed by prompt id, and their reader."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import chain, compress, islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from data.arguments import Count, Several, Tokens
from data.corpora.conditions import conditions, keeps
from data.corpora.identity import distinct_id, text_key
from data.corpora.stdlib import check_split, is_held_out
from data.files import files_below, read_json, shortened
from terminal.progress import track

if TYPE_CHECKING:
    import pyarrow

# Columns of the teacher's distributions, [n * top_k] a row.
TEACHER = ("teacher_ids", "teacher_probs")
IDS = ("prompt_ids", "answer_ids")  # what every collection has, with `id`
COMPLETE = "complete.json"  # of a collection that is: its shards, and the part that is read
PROMPTS = b"prompts"  # in a shard's metadata: the ids of its prompts, answered or not


class UnfitCollection(ValueError):
    """An error for a collection, in the folder `source`, that another model or tokenizer made."""

    def __init__(self, source: str, why: str):
        super().__init__(f"{source} was collected with {why}: collect it again, under another name")
        self.source = source


def shard_path(folder: str | Path, shard: int) -> Path:
    """Return the path of shard number `shard` of the collection in `folder`."""
    return Path(folder) / "shards" / f"{shard:05d}.parquet"


def read_manifest(folder: str | Path) -> dict:
    """Return the manifest of a collection: its teacher, parameters and fingerprints."""
    try:
        manifest = read_json(Path(folder) / "manifest.json", ("recipe", "tokenizer"))
    except NotADirectoryError:
        raise ValueError(
            f"source={folder} is no collection of answers, which are trained on. Collect its "
            "target's with: python -m decoding.collect recipe=deer_answers name=own "
            f"prompts.source={folder}, and give answers=runs/deer_answers/own"
        ) from None
    except FileNotFoundError:
        raise ValueError(
            f"no collection at {folder}: python -m decoding.collect recipe=... writes one"
        ) from None
    if part := _part(folder):
        _say_what_is_read(folder, part["prompts"])
    return manifest


def _part(folder: str | Path) -> dict[str, int]:
    """Return what is read of a collection that has more: how many prompts, shards, and of the last.

    They are `prompts`, `shards` and `in_last`; empty where all of it is read.
    """
    file = Path(folder) / COMPLETE
    found = read_json(file) if file.exists() else {}
    if "prompts" not in found:
        return {}
    part = {name: found.get(name, 0) for name in ("prompts", "shards", "in_last")}
    if any(type(n) is not int or n < 1 for n in part.values()):
        raise ValueError(f"{file} is damaged: it holds {shortened(found)}")
    return part


@cache
def _say_what_is_read(folder: str | Path, prompts: int) -> None:
    """Print, once, that only a part of a collection is read."""
    print(f"{folder}: the first {prompts} prompts are read, as many as were last asked for")


def read_shards(
    folder: str | Path, lists: Iterable[str] = ()
) -> Iterator[tuple[Path, "pyarrow.Table"]]:
    """Yield the shards of a collection in order, as file and table.

    A missing shard is an error, and so are columns other than the first shard's, or that do not
    hold text in `id`, token ids in `IDS`, and lists of integers in `lists`. Of a collection that
    was asked for fewer prompts than it has, only these are read.
    """
    import pyarrow.parquet as parquet
    from pyarrow.lib import ArrowException

    files, _ = files_below(Path(folder) / "shards")
    shards = [file for file in files if file.suffix == ".parquet"]
    if not shards:
        raise ValueError(f"{folder} holds no answers: python -m decoding.collect writes them")
    complete, part = Path(folder) / COMPLETE, _part(folder)
    expected = read_json(complete).get("shards") if complete.exists() else len(shards)
    if part:
        wanted = {shard_path(folder, i) for i in range(part["shards"])}
        shards = [file for file in shards if file in wanted]
    if len(shards) != expected:
        raise ValueError(
            f"{folder} had {expected} shards when it was complete and has {len(shards)} now: "
            "collect the others again with the command that made it"
        )
    first = None
    for shard in track(shards, f"answers in {folder}", unit="shards"):
        try:
            table = parquet.ParquetFile(shard).read()
        except (OSError, ArrowException) as error:
            raise ValueError(f"{shard} is damaged: {' '.join(str(error).split())}") from None
        if not len(table):  # none of its prompts could be answered
            continue
        table = with_turns(table)
        found = _checked_columns(shard, table, (*IDS, *lists))
        first = first or found
        if found != first:
            names = [name for name in {**first, **found} if first.get(name) != found.get(name)]
            raise ValueError(f"{shard} has other columns than {shards[0]}: {', '.join(names)}")
        if part and shard == shards[-1]:
            kept = {*shard_prompts(table)[: part["in_last"]]}
            table = table.filter([id in kept for id in table["id"].to_pylist()])
        yield shard, table.replace_schema_metadata(None)


def with_turns(table: "pyarrow.Table") -> "pyarrow.Table":
    """Return a shard with `turn`, which older ones of first questions alone do not have."""
    if "turn" in table.column_names or not len(table):
        return table
    return table.append_column("turn", [[0] * len(table)])


def shard_prompts(table: "pyarrow.Table") -> list[str]:
    """Return the ids of a shard's prompts in order; of an older one, those that are answered."""
    told = (table.schema.metadata or {}).get(PROMPTS)
    return json.loads(told) if told else [*dict.fromkeys(table["id"].to_pylist())]


def _checked_columns(shard: Path, table: "pyarrow.Table", lists: Iterable[str]) -> dict[str, str]:
    """Return the types of a shard's columns; ValueError where they are no collection's."""
    import pyarrow.compute as compute
    from pyarrow import types

    kinds = dict(zip(table.column_names, table.schema.types))
    heavy = TEACHER if any(name in kinds for name in TEACHER) else ()
    for name in ("id", *lists, *heavy):
        if name not in kinds:
            raise ValueError(f"{shard} has no column {name!r}, but {sorted(kinds)}")
        column, kind = table[name], kinds[name]
        if name == "id":
            right = types.is_string(kind) or types.is_large_string(kind)
        else:
            number = types.is_floating if name == TEACHER[1] else types.is_integer
            right = types.is_list(kind) and (
                number(kind.value_type) or (types.is_null(kind.value_type) and not len(column))
            )
        if not right or column.null_count:
            of = "text" if name == "id" else "lists of numbers"
            raise ValueError(f"{shard}: {name!r} does not hold {of} in every row, but {kind}")
        if name == "id":
            continue
        values = compute.list_flatten(column)
        numbers = values.to_numpy() if not values.null_count else np.array([-1])
        if len(numbers) and not 0 <= float(numbers.min()) <= float(numbers.max()) < 2**31:
            raise ValueError(
                f"{shard}: {name!r} has values that are no token ids, counts or shares"
            )
    found = {name: str(kind) for name, kind in kinds.items()}
    tokens = compute.list_value_length(table["answer_ids"]).to_numpy()
    tops = set()
    for name in heavy:
        sizes = compute.list_value_length(table[name]).to_numpy()
        tops.add(int(sizes[0] // max(tokens[0], 1)) if len(sizes) else 1)
        if min(tops) < 1 or len(tops) > 1 or (sizes != max(tops) * tokens).any():
            raise ValueError(f"{shard}: {name!r} has not as many values for each answer's token")
        found[name] += f" of {max(tops)}"
    return found


class AnsweredPrompt(NamedTuple):
    """A prompt and the teacher's answer to it.

    Attributes:
        ids: Token ids of both.
        trained: Whether each token is a training target: True in the answer only.
        columns: Further values of each token, {name: [n, ...]}: with `collector.top_k`, the
            teacher's most probable tokens and their probabilities, `teacher_ids` and
            `teacher_probs` (0 in the prompt).
        prompt: The prompt's id, made distinct where other prompts of the collection have it too.
    """

    ids: list[int]
    trained: list[bool]
    columns: dict[str, np.ndarray]
    prompt: str


def is_collection(source: str | Path) -> bool:
    """Return whether a path is the folder of a collection."""
    folder = Path(source).expanduser()
    return (folder / "manifest.json").is_file() and (folder / "shards").is_dir()


def in_split(prompt: str, split: str) -> bool:
    """Return whether the answers to a prompt belong to a split, by a hash of the prompt's id."""
    # Hash another string than the bare id: prompts come from training documents, whose ids are
    # never held out.
    return is_held_out(f"answers to {prompt}") == (split == "heldout")


def read_answers(
    folder: str | Path, split: str, where: str | None = None
) -> Iterator[AnsweredPrompt]:
    """Yield the encoded prompts and teacher answers of a collection, in the order of its shards.

    Args:
        folder: The collection's folder.
        split: 'train' or 'heldout', by a hash of the prompt's id.
        where: Conditions on the columns, such as 'finish_reason==eos' (`data.corpora.conditions`).

    Raises:
        ValueError: For a folder without answers, or an unknown split or column.
    """
    seen: dict[int, int] = {}
    for table, rows in chosen_rows(folder, split, where):
        # As arrays: lists of Python numbers of all distributions take a hundred times the memory.
        stored = {name: table[name] for name in TEACHER if name in table.column_names}
        for i, row in enumerate(rows):
            prompt, answer = row["prompt_ids"], row["answer_ids"]
            columns = {}
            for name, column in stored.items():
                values = column[i].values.to_numpy()
                values = values.reshape(len(answer), len(values) // max(len(answer), 1))
                zeros = np.zeros((len(prompt), values.shape[1]), values.dtype)
                columns[name] = np.concatenate([zeros, values])
            trained = [False] * len(prompt) + [True] * len(answer)
            id = distinct_id(row["id"], text_key(repr(prompt)), seen)
            yield AnsweredPrompt(prompt + answer, trained, columns, id)


def chosen_rows(
    folder: str | Path, split: str, where: str | None, lists: Iterable[str] = ()
) -> Iterator[tuple["pyarrow.Table", list[dict]]]:
    """Yield each shard's chosen rows: as a table, and as dicts without `TEACHER`.

    `lists` names columns of lists of integers that each shard must have.
    """
    check_split(split)
    asked = conditions(where)
    for shard, table in read_shards(folder, lists):
        heavy = [name for name in TEACHER if name in table.column_names]
        rows = table.drop_columns(heavy).to_pylist()
        chosen = [
            in_split(row["id"], split) and keeps(row, asked, f"{shard}, row {i}")
            for i, row in enumerate(rows)
        ]
        yield table.filter(chosen), [*compress(rows, chosen)]


def frequent_tokens(source: str | Several[str], count: Count) -> Tensor:
    """Return the ids [at most count], sorted, of the tokens that training answers use most.

    They are a drafter's vocabulary. Tokens that only prompts use come next, by their frequency
    there; tokens that occur in neither are left out. `source` is a collection, or several.
    """
    answers: Counter[int] = Counter()
    prompts: Counter[int] = Counter()
    sources = [source] if isinstance(source, str | Path) else source
    for ids, trained, *_ in chain.from_iterable(read_answers(s, "train") for s in sources):
        start = len(ids) - sum(trained)
        prompts.update(ids[:start])
        answers.update(ids[start:])
    if not answers:
        raise ValueError(f"source={source!r} has no answers for training: collect more prompts")
    ranked = sorted(answers | prompts, key=lambda t: (-answers[t], -prompts[t], t))
    return torch.tensor(sorted(ranked[:count]))


def sequences(source: str, count: Count, length: Tokens) -> list[list[int]]:
    """Return the first `count` training prompts with answers, cut to `length` token ids."""
    return [answered.ids[:length] for answered in islice(read_answers(source, "train"), count)]
