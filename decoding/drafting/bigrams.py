"""Which token follows which: what positions that are drafted independently cannot know.

A drafter that drafts a block in one pass gives each position's law given the committed text alone.
In a tree the parent of a node is known, so its children can be ranked by

    s (log q_i(v) + g(v)) + w log(b(v | u) / p(v)),
    b(v | u) = (c(u, v) + beta p(v)) / (c(u) + beta),

where c counts how often v followed u in the target's answers, p(v) how often v is there at all, and
b is a bigram model (Dirichlet prior, as in MacKay and Peto, 1995). A parent's children do not feel
a number that is the same for all of them, so of log b/p only `lift` matters,

    lift(u, v) = log(1 + c(u, v) / (beta p(v))),

which is 0 for a pair that was never seen: only the others are stored. A tree may be ranked by
anything, verification does not change; so this costs no law, and a wrong table only speed. Ours.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

FILE = "bigrams.safetensors"  # of an export


class Bigrams(NamedTuple):
    """pairs [n], in order: u vocabulary + v. lift [n], see the module; u, v < vocabulary."""

    pairs: Tensor
    lift: Tensor
    vocabulary: int

    def behind(self, before: int) -> dict[int, float]:
        """{v: lift(before, v)} of all v that were seen behind a token."""
        pairs, (here,) = self.pairs.numpy(), self._ranges([before])
        return dict(zip((pairs[here] % self.vocabulary).tolist(), self.lift.numpy()[here].tolist()))

    def rows(self, before: Tensor) -> Tensor:
        """lift(u, v) of all v: tokens u [n] -> [n, vocabulary]."""
        rows = torch.zeros(len(before), self.vocabulary)
        for row, here in zip(rows, self._ranges(before.tolist())):
            row[self.pairs[here] % self.vocabulary] = self.lift[here]
        return rows.to(before.device)

    def _ranges(self, before: list[int]) -> list[slice]:
        """Where the pairs of each token are."""
        ends = [(u * self.vocabulary, (u + 1) * self.vocabulary) for u in before]
        return [slice(*pair) for pair in np.searchsorted(self.pairs.numpy(), ends).tolist()]


def count(
    texts: Iterable[list[int]], vocabulary: int, beta: float = 10.0, most: int = 10_000_000
) -> Bigrams:
    """The pairs of texts of token ids below vocabulary; of more than `most` the most frequent.

    Errors: texts without a pair.
    """
    pairs, counts = torch.empty(0, dtype=torch.long), torch.empty(0, dtype=torch.long)
    for new in _batches(texts, vocabulary):
        both, index = torch.cat([pairs, new]).unique(return_inverse=True)
        weights = torch.cat([counts, torch.ones_like(new)])
        pairs, counts = both, torch.zeros_like(both).index_add_(0, index, weights)
    if not len(pairs):
        raise ValueError("no text has two tokens, so there is nothing to count")
    after = pairs % vocabulary
    p = torch.zeros(vocabulary).index_add_(0, after, counts.float()) / counts.sum()
    lift = (counts / (beta * p[after])).log1p()
    kept = counts.argsort(descending=True, stable=True)[:most].sort().values
    return Bigrams(pairs[kept], lift[kept], vocabulary)


def _batches(
    texts: Iterable[list[int]], vocabulary: int, size: int = 1_000_000
) -> Iterator[Tensor]:
    """All neighbours as u vocabulary + v, about `size` at a time."""
    found, waiting = [], 0
    for text in texts:
        ids = torch.tensor(text, dtype=torch.long)
        found.append(ids[:-1] * vocabulary + ids[1:])
        waiting += len(found[-1])
        if waiting >= size:
            yield torch.cat(found)
            found, waiting = [], 0
    if found:
        yield torch.cat(found)


def write(bigrams: Bigrams, folder: Path) -> None:
    """Into an export, whole or not at all."""
    temporary = folder / f".{FILE}"
    tensors = {"pairs": bigrams.pairs, "lift": bigrams.lift}
    save_file(tensors, temporary, metadata={"vocabulary": str(bigrams.vocabulary)})
    temporary.replace(folder / FILE)


def read(file: Path) -> Bigrams:
    """Of an export. Errors: a file that is missing or damaged."""
    try:
        with safe_open(file, "pt") as stored:
            vocabulary = int(stored.metadata()["vocabulary"])
            return Bigrams(stored.get_tensor("pairs"), stored.get_tensor("lift"), vocabulary)
    except Exception as error:
        raise ValueError(
            f"cannot read {file} ({error}): make it anew with python -m decoding.calibrate, or "
            "leave it out with sampler=[bigrams=false]"
        ) from error
