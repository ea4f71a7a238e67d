"""Collections of teacher answers on disk: Parquet shards keyed by prompt id, and their reader."""

from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from data.corpora.conditions import conditions, keeps
from data.corpora.stdlib import check_split, is_held_out
from data.files import read_json

if TYPE_CHECKING:
    import pyarrow

# Columns of the teacher's distributions, [n * top_k] a row.
TEACHER = ("teacher_ids", "teacher_probs")
TEMPERATURE = "temperature"  # at which each token of an answer was drawn


def shard_path(folder: str | Path, shard: int) -> Path:
    """The path of shard number `shard` of the collection in `folder`."""
    return Path(folder) / "shards" / f"{shard:05d}.parquet"


def read_manifest(folder: str | Path) -> dict:
    """The manifest of a collection: its teacher, parameters and fingerprints.

    Raises:
        ValueError: if `folder` holds no collection.
    """
    try:
        return read_json(Path(folder) / "manifest.json", ("recipe", "tokenizer"))
    except FileNotFoundError:
        raise ValueError(
            f"no collection at {folder}: python -m decoding.collect recipe=... writes one"
        ) from None


def read_shards(folder: str | Path) -> Iterator[tuple[Path, "pyarrow.Table"]]:
    """The shards of a collection, in their order.

    Yields:
        A shard's file and its table.

    Raises:
        ValueError: if there is none, one is damaged, or the collection is complete and some of its
            shards are not there any more.
    """
    import pyarrow.parquet as parquet
    from pyarrow.lib import ArrowInvalid

    shards = sorted((Path(folder) / "shards").glob("*.parquet"))
    if not shards:
        raise ValueError(f"{folder} holds no answers: python -m decoding.collect writes them")
    complete = Path(folder) / "complete.json"
    expected = read_json(complete).get("shards") if complete.exists() else len(shards)
    if len(shards) != expected:
        raise ValueError(
            f"{folder} had {expected} shards when it was complete and has {len(shards)} now: "
            "collect the others again with the command that made it"
        )
    for shard in shards:
        try:
            yield shard, parquet.read_table(shard)
        except (OSError, ArrowInvalid) as error:
            raise ValueError(f"{shard} is damaged: {' '.join(str(error).split())}") from None


class AnsweredPrompt(NamedTuple):
    """A prompt and the teacher's answer to it.

    Attributes:
        ids: Token ids of both.
        trained: For each token whether it is a training target: True for the answer only.
        columns: Further values of each token, {name: [n, ...]}: `temperature`, at which it was
            drawn, and with `collector.top_k`, `teacher_ids` and `teacher_probs`, the teacher's most
            probable tokens there and their probabilities (of the prompt all 0).
        prompt: The prompt's id.
    """

    ids: list[int]
    trained: list[bool]
    columns: dict[str, np.ndarray]
    prompt: str


def is_collection(source: str | Path) -> bool:
    """Whether a path is the folder of a collection."""
    folder = Path(source).expanduser()
    return (folder / "manifest.json").is_file() and (folder / "shards").is_dir()


def in_split(prompt: str, split: str) -> bool:
    """Whether the answers to a prompt belong to a split, by a hash of the prompt's id."""
    # Hash another string than the bare id: prompts come from training documents, whose ids are
    # never held out.
    return is_held_out(f"answers to {prompt}") == (split == "heldout")


def read_answers(
    folder: str | Path, split: str, where: str | None = None
) -> Iterator[AnsweredPrompt]:
    """The encoded prompts and teacher answers of a collection, in the order of its shards.

    Args:
        folder: the collection's folder.
        split: 'train' or 'heldout', by a hash of the prompt's id.
        where: read only the answers that meet these conditions on the columns of the shards, such
            as 'finish_reason==eos' (`data.corpora.conditions`).

    Raises:
        ValueError: for an unknown split, a folder without answers, or a condition on a column
            that the shards do not have.
    """
    check_split(split)
    asked = conditions(where)
    for shard, table in read_shards(folder):
        # As arrays: lists of Python numbers of all distributions take a hundred times the memory.
        stored = {name: table[name] for name in TEACHER if name in table.column_names}
        for i, row in enumerate(table.drop_columns([*stored]).to_pylist()):
            if in_split(row["id"], split) and keeps(row, asked, f"{shard}, row {i}"):
                prompt, answer = row["prompt_ids"], row["answer_ids"]
                columns = {
                    name: _after(prompt, column[i].values.to_numpy().reshape(len(answer), -1))
                    for name, column in stored.items()
                }
                trained = [False] * len(prompt) + [True] * len(answer)
                if TEMPERATURE in row:
                    columns[TEMPERATURE] = np.full(len(trained), row[TEMPERATURE], np.float32)
                yield AnsweredPrompt(prompt + answer, trained, columns, row["id"])


def _after(prompt: list[int], values: np.ndarray) -> np.ndarray:
    """Values [n, k] of an answer, after zeros for the prompt."""
    return np.concatenate([np.zeros((len(prompt), values.shape[1]), values.dtype), values])


def frequent_tokens(source: str, count: int) -> Tensor:
    """The tokens that a collection's training answers use most, as a vocabulary of a drafter.

    Tokens that answers do not use follow in the order of their use in prompts; tokens that occur
    in neither are left out.

    Args:
        source: the collection's folder.
        count: maximum number of tokens.

    Returns:
        Their ids [at most count], sorted.

    Raises:
        ValueError: as `read_answers` does, or for a count below 1.
    """
    if count < 1:
        raise ValueError(f"count={count} is no vocabulary. Choose at least 1.")
    answers, prompts = Counter(), Counter()
    for ids, trained, *_ in read_answers(source, "train"):
        start = len(ids) - sum(trained)
        prompts.update(ids[:start])
        answers.update(ids[start:])
    ranked = sorted(answers | prompts, key=lambda t: (-answers[t], -prompts[t], t))
    return torch.tensor(sorted(ranked[:count]))


def sequences(source: str, count: int, length: int) -> list[list[int]]:
    """The first prompts of a collection with their training answers, as plain token ids.

    Args:
        source: The collection's folder.
        count: Of the sequences; fewer where there are fewer.
        length: Tokens of each at most.

    Raises:
        ValueError: As `read_answers` does, or for a count or a length below 1.
    """
    if min(count, length) < 1:
        raise ValueError(f"count={count}, length={length} is not allowed: give at least 1 of each")
    return [answered.ids[:length] for answered in islice(read_answers(source, "train"), count)]
