"""Plain randomness of one torch generator: for tests that draw hundreds of thousands at once."""

import torch


class TorchRandomness:
    """`decoding.engine.randomness.ContinuousRandomness` without keys: rows share one generator."""

    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(seed)

    def _uniform(self, shape):
        return torch.rand(tuple(shape), generator=self.generator, dtype=torch.float64)

    def accept(self, prob):
        return self._uniform(prob.shape) < prob

    def categorical(self, probs):
        cumulative = probs.double().cumsum(-1)
        u = self._uniform(probs.shape[:-1])[..., None] * cumulative[..., -1:]
        return (cumulative <= u).sum(-1).clamp_max(probs.shape[-1] - 1)

    def normal(self, shape):
        return torch.randn(tuple(shape), generator=self.generator, dtype=torch.float64)

    def split(self):
        return self

    def select(self, rows):
        pass


def gaussian_overlap(q, p):
    """The overlap of two Gaussians of equal variances, 2 Phi(-|z| / 2): [...]."""
    z = ((q.mean - p.mean) / p.std).double().norm(dim=-1)
    return 2 * torch.special.ndtr(-z / 2)
