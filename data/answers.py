"""Collected rows on disk: Parquet shards keyed by prompt id, and how training reads them."""

from collections.abc import Iterator
from pathlib import Path

from data.sources import in_split


def shard_path(folder: str | Path, shard: int) -> Path:
    """Where a collection keeps a shard."""
    return Path(folder) / "shards" / f"{shard:05d}.parquet"


def read_answers(folder: str | Path, split: str) -> Iterator[tuple[list[int], list[bool]]]:
    """(ids, trained) of every prompt with its answer; only the answer's tokens are trained."""
    import pyarrow.parquet as parquet

    shards = sorted((Path(folder) / "shards").glob("*.parquet"))
    if not shards:
        raise ValueError(f"{folder} holds no answers: python -m decoding.collect writes them")
    for shard in shards:
        for row in parquet.read_table(shard).to_pylist():
            if in_split(row["id"], split):
                prompt, answer = row["prompt_ids"], row["answer_ids"]
                yield prompt + answer, [False] * len(prompt) + [True] * len(answer)
