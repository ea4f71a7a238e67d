"""Collections of teacher answers on disk: Parquet shards keyed by prompt id, and their reader."""

import json
from collections.abc import Iterator
from pathlib import Path

from data.corpora.stdlib import check_split, is_held_out


def shard_path(folder: str | Path, shard: int) -> Path:
    """The path of shard number `shard` of the collection in `folder`."""
    return Path(folder) / "shards" / f"{shard:05d}.parquet"


def read_manifest(folder: str | Path) -> dict:
    """The manifest of a collection: its teacher, parameters and fingerprints.

    Raises:
        ValueError: if `folder` holds no collection.
    """
    try:
        return json.loads((Path(folder) / "manifest.json").read_text())
    except FileNotFoundError:
        raise ValueError(
            f"no collection at {folder}: python -m decoding.collect recipe=... writes one"
        ) from None


def read_answers(folder: str | Path, split: str) -> Iterator[tuple[list[int], list[bool]]]:
    """The encoded prompts and teacher answers of a collection, in the order of its shards.

    Args:
        folder: the collection's folder.
        split: 'train' or 'heldout', by a hash of the prompt's id.

    Yields:
        Token ids of a prompt and its answer, and for each token whether it is trained: True for
        the answer only.

    Raises:
        ValueError: for an unknown split, or a folder without answers.
    """
    import pyarrow.parquet as parquet

    check_split(split)
    shards = sorted((Path(folder) / "shards").glob("*.parquet"))
    if not shards:
        raise ValueError(f"{folder} holds no answers: python -m decoding.collect writes them")
    for shard in shards:
        for row in parquet.read_table(shard).to_pylist():
            # Hash another string than the bare id: prompts come from training documents, whose
            # ids are never held out.
            if is_held_out(f"answers to {row['id']}") == (split == "heldout"):
                prompt, answer = row["prompt_ids"], row["answer_ids"]
                yield prompt + answer, [False] * len(prompt) + [True] * len(answer)
