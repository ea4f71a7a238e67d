"""The n-grams of earlier texts: which tokens followed the same tokens before, and how often.

The distribution is interpolated (Witten and Bell, 1991): with C tokens seen after the last n ones,
T of them different,

    p_n(v) = C / (C + T) count(v) / C + T / (C + T) p_{n-1}(v),

n from N down to 1. Suffix decoding drafts from earlier answers too (arXiv 2411.04975).
"""

from collections import Counter
from collections.abc import Iterable
from heapq import nlargest
from operator import itemgetter

import numpy as np

N = 3  # tokens that the next one is counted after; more bring nothing (docs/results/ngram.md)
MOST = 256  # latest tokens after a context that are read
CANDIDATES = 24  # tokens after a context that are returned
NEGLIGIBLE = 0.02  # probability of what shorter contexts would say


class Ngrams:
    """The n-grams of texts, of which the latest are kept.

    A context is one number, its last token first, so that those of one n lie side by side, the
    latest at the end.

    Args:
        vocabulary: The number of tokens.
        kept: The most tokens that are kept; a quarter more before the oldest go.
    """

    def __init__(self, vocabulary: int, kept: int):
        self._vocabulary, self.kept, self._seen = vocabulary, kept, 0
        self._contexts = np.empty(0, np.int64)
        self._tokens, self._times = np.empty(0, np.int32), np.empty(0, np.int64)
        self._known: dict[tuple[int, ...], dict[int, float]] = {}

    def __len__(self) -> int:
        return len(self._tokens)

    def add(self, texts: Iterable[list[int]]) -> None:
        """Count the tokens of texts, but for the first N of each, which have no whole context."""
        lines = [np.array(text, np.int64) for text in texts if len(text) > N]
        if not lines or not self.kept:
            return
        contexts = np.concatenate([self._contexts_of(line) for line in lines])
        tokens = np.concatenate([line[N:] for line in lines])
        order = np.argsort(contexts, kind="stable")
        at = np.searchsorted(self._contexts, contexts[order], "right")
        self._contexts = np.insert(self._contexts, at, contexts[order])
        self._tokens = np.insert(self._tokens, at, tokens[order])
        self._times = np.insert(self._times, at, self._seen + order)
        self._seen, self._known = self._seen + len(tokens), {}
        if len(self) > self.kept * 1.25:
            young = self._times >= self._seen - self.kept
            self._contexts, self._tokens = self._contexts[young], self._tokens[young]
            self._times = self._times[young]

    def _contexts_of(self, line: np.ndarray) -> np.ndarray:
        """Return the context of each token of a text from the N-th on."""
        before = (line[N - n : -n] * self._vocabulary ** (N - n) for n in range(1, N + 1))
        return np.sum([*before], axis=0)

    def after(self, suffix: tuple[int, ...]) -> dict[int, float]:
        """Return the probabilities of the likeliest tokens after the last ones of a text.

        They are CANDIDATES at the most, were seen before, and add up to less than 1.
        """
        last = suffix[-N:]
        if last not in self._known:
            self._known[last] = self._after(last)
        return self._known[last]

    def _after(self, suffix: tuple[int, ...]) -> dict[int, float]:
        found: dict[int, float] = {}
        rest, V = 1.0, self._vocabulary
        for n in range(len(suffix), 0, -1):
            first = sum(v * V ** (N - i) for i, v in enumerate(suffix[: -n - 1 : -1], 1))
            start, stop = map(self._contexts.searchsorted, (first, first + V ** (N - n)))
            if start == stop:
                continue
            counts = Counter(self._tokens[max(start, stop - MOST) : stop].tolist())
            part = rest / (counts.total() + len(counts))
            for token, count in counts.items():
                found[token] = found.get(token, 0.0) + part * count
            rest = part * len(counts)
            if rest < NEGLIGIBLE:
                break
        if len(found) <= CANDIDATES:
            return found
        return dict(nlargest(CANDIDATES, found.items(), itemgetter(1)))
