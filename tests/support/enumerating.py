"""Randomness that enumerates all outcomes, for the exact output distribution of a sampler.

Every row of a batch follows its own path of decisions. Where a row's path ends it takes the first
possible outcome and leaves the others as new paths; the distribution is complete when no path is
left. Many paths run as rows of one ragged batch, so the enumeration tests batching as well.
"""

import math

import torch

# Where p = q in truth, p/q is 1 up to rounding, which may differ from batch to batch: a path
# through such a rejection might not exist in another batch. The sum of the distribution shows how
# much is left out.
ROUNDING = 1e-14


class EnumeratingRandomness:
    """Randomness of a batch of paths; weight[r] is the probability of the path that row r took."""

    def __init__(self, paths):
        self.paths = paths
        self.taken = [[] for _ in paths]
        self.weight = [1.0] * len(paths)
        self.left = []  # paths that this batch discovered and did not take
        self.rows = list(range(len(paths)))

    def categorical(self, probs):
        probs = probs / probs.sum(-1, keepdim=True)
        return self._walk(probs)

    def accept(self, prob):
        return self._walk(torch.stack([1 - prob, prob], -1)).bool()

    def gumbel(self, positions, vocabulary):
        raise AssertionError("keyed noise cannot be enumerated: coupled is tested by identity")

    def select(self, rows):
        self.rows = [self.rows[b] for b in rows.tolist()]

    def _walk(self, probs):
        """Decide each element along its row's path: [B, ..., outcomes] -> [B, ...]."""
        flat = probs.reshape(len(self.rows), -1, probs.shape[-1]).tolist()
        decided = [
            [self._decide(r, outcomes) for outcomes in elements]
            for r, elements in zip(self.rows, flat)
        ]
        return torch.tensor(decided).view(probs.shape[:-1])

    def _decide(self, row, probs):
        possible = [i for i, p in enumerate(probs) if p > ROUNDING]
        if len(possible) == 1:
            return possible[0]
        taken, path = self.taken[row], self.paths[row]
        if len(taken) < len(path):
            outcome = path[len(taken)]
        else:
            outcome, *others = possible
            self.left += [[*taken, other] for other in others]
        taken.append(outcome)
        self.weight[row] *= probs[outcome]
        return outcome


def output_distribution(sampler, prompt, params, batch=2048):
    """The exact distribution {answer: probability} of a sampler, by enumeration."""
    distribution, paths = {}, [[]]
    while paths:
        now, paths = paths[:batch], paths[batch:]
        randomness = EnumeratingRandomness(now)
        results = sampler.generate([prompt] * len(now), params, randomness=randomness)
        for result, weight in zip(results, randomness.weight):
            answer = tuple(result.token_ids)
            distribution[answer] = distribution.get(answer, 0.0) + weight
        paths += randomness.left
    assert math.isclose(sum(distribution.values()), 1.0, abs_tol=1e-9)
    return distribution
