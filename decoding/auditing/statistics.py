"""How far a program's answers are from a distribution: exactly by enumeration, or by a test."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from decoding.auditing.reference import index_of

ALPHA = 0.001  # of the chi-square test: a right program fails it once in a thousand audits
POWER = 0.99  # with which the stated distance is found
LEAST = 5  # expected answers of a cell; rarer answers share one


class Enumerator:
    """Randomness that walks every outcome: give it to a program instead of a generator.

    A program draws with `categorical` and `accept` only, and is run once for each path of
    outcomes; the paths' probabilities add up to 1.
    """

    def __init__(self):
        self._path: list[tuple[int, list[float]]] = []
        self._at, self.weight = 0, 1.0

    def categorical(self, probs) -> int:
        """An index drawn with these probabilities."""
        if self._at == len(self._path):
            p = [float(x) for x in probs]
            p = [x / sum(p) for x in p]  # as generators do
            self._path.append((next(i for i, x in enumerate(p) if x > 0), p))
        choice, p = self._path[self._at]
        self._at += 1
        self.weight *= p[choice]
        return choice

    def accept(self, prob) -> bool:
        """True with this probability."""
        p = min(max(float(prob), 0.0), 1.0)
        return self.categorical([1 - p, p]) == 1

    def next_path(self) -> bool:
        """Go on to the next path; False after the last one."""
        while self._path:
            choice, p = self._path.pop()
            later = [i for i in range(choice + 1, len(p)) if p[i] > 0]
            if later:
                self._path.append((later[0], p))
                self._at, self.weight = 0, 1.0
                return True
        return False


def enumerate_answers(program: Callable[[Enumerator], list[int]], size: int) -> Tensor:
    """A program's exact distribution.

    Args:
        program: Decodes one answer with the randomness that it is given.
        size: Of the distribution.

    Returns:
        float64 [size].
    """
    randomness, found = Enumerator(), torch.zeros(size, dtype=torch.double)
    while True:
        answer = program(randomness)
        found[index_of(answer)] += randomness.weight
        if not randomness.next_path():
            return found


def total_variation(a: Tensor, b: Tensor) -> float:
    """Half the L1 distance of two distributions."""
    return float((a - b).abs().sum() / 2)


@dataclass(frozen=True)
class Verdict:
    """What a chi-square test of sampled answers says.

    Attributes:
        samples: Answers that were drawn.
        p: Of the test: how often a right program's answers are as far off as these.
        distance: Total variation of the sample from the distribution.
        expected: The distance that a right program's sample has on average.
        found: The least total variation that is found with probability POWER at this many samples.
    """

    samples: int
    p: float
    distance: float
    expected: float
    found: float

    @property
    def right(self) -> bool:
        """Whether the program passes."""
        return self.p >= ALPHA


def chi_square(answers: list[int], exact: Tensor) -> Verdict:
    """Test sampled answers against a distribution (Pearson's chi-square, rare answers pooled).

    The stated distance: answers at a total variation of d have a chi-square divergence of 4 d^2 at
    least (Cauchy-Schwarz), so a test of n answers has a noncentrality of 4 d^2 n at least. Pooling
    can hide what happens among the pooled answers only.

    Args:
        answers: The index of each answer.
        exact: float64 [size], the distribution.
    """
    from scipy import optimize, stats

    n, exact = len(answers), exact.numpy()
    counts = np.bincount(answers, minlength=len(exact))
    order = np.argsort(-exact)
    kept = order[exact[order] * n >= LEAST]
    rest = 1 - exact[kept].sum()
    seen, wanted = counts[kept], n * exact[kept]
    if rest * n >= LEAST:
        seen, wanted = np.append(seen, n - seen.sum()), np.append(wanted, n * rest)
    statistic, degrees = ((seen - wanted) ** 2 / wanted).sum(), len(seen) - 1
    critical = stats.chi2.isf(ALPHA, degrees)
    noncentral = optimize.brentq(lambda x: stats.ncx2.sf(critical, degrees, x) - POWER, 1e-6, 1e4)
    draws = np.random.default_rng(0).multinomial(n, exact / exact.sum(), 200) / n
    return Verdict(
        samples=n,
        p=float(stats.chi2.sf(statistic, degrees)),
        distance=float(np.abs(counts / n - exact).sum() / 2),
        expected=float(np.abs(draws - exact).sum(1).mean() / 2),
        found=float((noncentral / n) ** 0.5 / 2),
    )
