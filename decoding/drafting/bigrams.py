"""Bigram scores: pointwise mutual information of neighbouring tokens, counted in teacher answers.

A drafter that drafts a block in one pass gives every position a distribution conditioned on the
committed text alone. In a draft tree the parent of a node is known as well, so its children can be
ranked by

    s (log q_i(v) + g(v)) + w log(b(v | u) / p(v)),
    b(v | u) = (c(u, v) + beta p(v)) / (c(u) + beta),

where u is the parent's token, v the child's, q_i the drafter's distribution at depth i, g the noise
that the target will use, s and w fitted weights, c(u, v) how often v followed u in the target's
answers, p(v) the relative frequency of v in them, and b a bigram model with a Dirichlet prior
(MacKay and Peto, 1995). A term that all children of a parent share does not change their ranking,
so log(b / p), the pointwise mutual information (PMI) of u and v, may be replaced by

    score(u, v) = log(1 + c(u, v) / (beta p(v))),

which is 0 for a pair that was never seen: only the pairs that were seen are stored. Verification
is exact for any ranking, so a wrong table costs speed and changes no output. The method is ours.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from data.files import atomic_write
from decoding.engine import tensor_file

FILE = "bigrams.tensors"  # in an export's folder
INSTEAD = "decode without them, sampler=[bigrams=false], or run python -m decoding.calibrate"


class Bigrams(NamedTuple):
    """A sparse table of bigram scores.

    Attributes:
        pairs: int64 [n], ascending: (u, v) is stored as u * vocabulary + v, both below vocabulary.
        scores: float32 [n], score(u, v) of each pair (see the module's docstring).
    """

    pairs: Tensor
    scores: Tensor
    vocabulary: int

    def after(self, previous: int) -> dict[int, float]:
        """Return the scores {v: score(previous, v)} of all tokens v seen after one token."""
        pairs, (stored,) = self.pairs.numpy(), self._ranges([previous])
        tokens = (pairs[stored] % self.vocabulary).tolist()
        return dict(zip(tokens, self.scores.numpy()[stored].tolist()))

    def rows(self, previous: Tensor) -> Tensor:
        """Return dense rows score(u, v), float32 [n, vocabulary], of tokens u, `previous` [n]."""
        rows = torch.zeros(len(previous), self.vocabulary, dtype=torch.float32)
        for row, stored in zip(rows, self._ranges(previous.tolist())):
            row[self.pairs[stored] % self.vocabulary] = self.scores[stored]
        return rows.to(previous.device)

    def _ranges(self, previous: list[int]) -> list[slice]:
        """Find where the pairs that begin with each of these tokens are stored."""
        ends = [(u * self.vocabulary, (u + 1) * self.vocabulary) for u in previous]
        return [slice(*pair) for pair in np.searchsorted(self.pairs.numpy(), ends).tolist()]


def count(
    texts: Iterable[list[int]], vocabulary: int, beta: float = 10.0, most: int = 10_000_000
) -> Bigrams:
    """Count the bigram table of tokenised texts; ValueError where no text has two tokens.

    Args:
        texts: Token ids of each text, all below `vocabulary`.
        beta: Strength of the Dirichlet prior, in counts.
        most: Pairs to keep, the most frequent ones.
    """
    pairs, counts = torch.empty(0, dtype=torch.long), torch.empty(0, dtype=torch.long)
    for new in _batches(texts, vocabulary):
        both, index = torch.cat([pairs, new]).unique(return_inverse=True)
        weights = torch.cat([counts, torch.ones_like(new)])
        pairs, counts = both, torch.zeros_like(both).index_add_(0, index, weights)
    if not len(pairs):
        raise ValueError("no text has two tokens, so there are no bigrams to count")
    following = pairs % vocabulary
    p = torch.zeros(vocabulary).index_add_(0, following, counts.float()) / counts.sum()
    scores = (counts / (beta * p[following])).log1p()
    kept = counts.argsort(descending=True, stable=True)[:most].sort().values
    return Bigrams(pairs[kept], scores[kept], vocabulary)


def _batches(
    texts: Iterable[list[int]], vocabulary: int, size: int = 1_000_000
) -> Iterator[Tensor]:
    """Yield all pairs of neighbours as u * vocabulary + v, about `size` at a time."""
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
    """Write a table into an export's folder, atomically."""
    # The tensor's name in the file is part of the export format.
    tensors = {"pairs": bigrams.pairs, "scores": bigrams.scores}
    with atomic_write(folder / FILE) as temporary:
        save_file(tensors, temporary, metadata={"vocabulary": str(bigrams.vocabulary)})


def read(file: Path) -> Bigrams:
    """Read an export's table; ValueError where it is missing or damaged."""
    with tensor_file.opened(file, "the bigrams", INSTEAD) as stored:
        vocabulary = int(stored.metadata()["vocabulary"])
        pairs, scores = stored.get_tensor("pairs"), stored.get_tensor("scores")
        tensor_file.finite(scores)
    return Bigrams(pairs, scores, vocabulary)
