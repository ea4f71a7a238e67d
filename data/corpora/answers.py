"""Collected rows on disk: Parquet shards keyed by prompt id, and how training reads them."""

import json
from collections.abc import Iterator
from pathlib import Path

from data.corpora.stdlib import check_split, is_held_out


def shard_path(folder: str | Path, shard: int) -> Path:
    """Where a collection keeps a shard."""
    return Path(folder) / "shards" / f"{shard:05d}.parquet"


def read_manifest(folder: str | Path) -> dict:
    """What a collection was made with: teacher, parameters, fingerprints."""
    try:
        return json.loads((Path(folder) / "manifest.json").read_text())
    except FileNotFoundError:
        raise ValueError(
            f"no collection at {folder}: python -m decoding.collect recipe=... writes one"
        ) from None


def read_answers(folder: str | Path, split: str) -> Iterator[tuple[list[int], list[bool]]]:
    """(ids, trained) of every prompt with its answer; only the answer's tokens are trained."""
    import pyarrow.parquet as parquet

    check_split(split)
    shards = sorted((Path(folder) / "shards").glob("*.parquet"))
    if not shards:
        raise ValueError(f"{folder} holds no answers: python -m decoding.collect writes them")
    for shard in shards:
        for row in parquet.read_table(shard).to_pylist():
            # Prompts come from training documents: their ids alone are never held out.
            if is_held_out(f"answers to {row['id']}") == (split == "heldout"):
                prompt, answer = row["prompt_ids"], row["answer_ids"]
                yield prompt + answer, [False] * len(prompt) + [True] * len(answer)
