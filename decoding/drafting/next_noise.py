"""The target's keyed noise at a sequence's next positions, as drafts are ranked by it.

The target chooses the token with the largest log p + g. With the noise g known, a draft v of
several sources, p(v) = sum_i b_i p_i(v), is right with probability

    p'(v) = sum_i b_i' p_i(v) e^g(v) / Z_i,    b_i' ~ b_i Z_i,    Z_i = sum_v p_i(v) e^g(v).
"""

from collections.abc import Mapping
from functools import cache
from math import exp

import numpy as np
from torch import Tensor

SURE = 1 - 1e-9  # the largest weight: a logarithm is taken of the rest


class NextNoise:
    """The noise of one sequence, on the host.

    Args:
        noise: [k + 1, V], of the next positions.

    Attributes:
        most: k, the most tokens of a draft.
    """

    def __init__(self, noise: Tensor):
        self._noise, self.most = noise, len(noise) - 1
        self._at, self.mean = cache(self._whole), cache(self._mean)

    def of(self, depth: int, tokens: list[int]) -> list[float]:
        """Return the noise of some tokens at a position."""
        return self._at(depth)[tokens].tolist()

    def _whole(self, depth: int) -> np.ndarray:
        return self._noise[depth].cpu().numpy()

    def _mean(self, depth: int) -> float:
        """Return the mean of e^g over all tokens at a position."""
        return float(np.exp(self._at(depth)).mean())

    def weighed(
        self, depth: int, guesses: Mapping[int, float], weight: float, others: float | None
    ) -> tuple[dict[int, float], float]:
        """Return what some guesses r(v) and their weight b become where the noise is known.

        `others` is log Z of the other source, which has what the guesses leave; None: nobody speaks
        for these tokens, so all are alike.
        """
        noise = self.of(depth, [*guesses])
        chances = {v: r * exp(g) for (v, r), g in zip(guesses.items(), noise)}
        total = sum(chances.values())
        rest = max(0.0, 1 - weight * sum(guesses.values()))
        rest *= self.mean(depth) if others is None else exp(others)
        weight *= total
        found = {v: chance / total for v, chance in chances.items()}
        return found, min(SURE, weight / (weight + rest))
