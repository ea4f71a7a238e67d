"""Densities of continuous tokens: Gaussians and Gaussian mixtures.

Heads return them, and verification compares a drafter's with the target's. A density of batch
shape [...] over tokens of D numbers has `log_prob(x)`, `sample(randomness)`, `cooled(temperature)`
and `repeated(m)`. Samples draw noise from the given object (`normal` and `categorical` on batched
shapes). Log-densities are float64, because acceptance depends on the ratio of almost equal ones.
"""

import math
from typing import NamedTuple

from torch import Tensor


class Gaussian(NamedTuple):
    """Gaussians N(mean, diag(std^2)) over tokens; mean and std [..., D].

    >>> Gaussian(torch.zeros(2), torch.ones(2)).log_prob(torch.zeros(2)).item()  # -log(2 pi)
    -1.8378770664093453
    """

    mean: Tensor
    std: Tensor

    def log_prob(self, x: Tensor) -> Tensor:
        """Return the log-density [...] of tokens x [..., D], in float64."""
        return normal_log_prob(x, self.mean, self.std)

    def sample(self, randomness) -> Tensor:
        """Draw one token [..., D] from each density."""
        return self.mean + self.std * randomness.normal(self.mean.shape).to(self.mean)

    def cooled(self, temperature: float) -> "Gaussian":
        """Return the density with its standard deviation multiplied by `temperature`."""
        return self._replace(std=self.std * temperature)

    def repeated(self, m: int) -> "Gaussian":
        """Return the density repeated along a new batch axis, [..., m], for m samples of each."""
        return Gaussian(*(t.unsqueeze(-2).expand(*t.shape[:-1], m, -1) for t in self))


class GaussianMixture(NamedTuple):
    """Mixtures of K Gaussians: sum_k softmax(logits)_k N(mean_k, diag(std_k^2)).

    `logits` is [..., K]; `mean` and `std` are [..., K, D].
    """

    logits: Tensor
    mean: Tensor
    std: Tensor

    def log_prob(self, x: Tensor) -> Tensor:
        """Return the log-density [...] of tokens x [..., D], in float64."""
        log_weight = self.logits.double().log_softmax(-1)
        return (log_weight + normal_log_prob(x.unsqueeze(-2), self.mean, self.std)).logsumexp(-1)

    def sample(self, randomness) -> Tensor:
        """Draw one token [..., D] from each density."""
        k = randomness.categorical(self.logits.softmax(-1))[..., None, None]
        k = k.expand(*k.shape[:-1], self.mean.shape[-1])
        chosen = Gaussian(*(t.gather(-2, k).squeeze(-2) for t in (self.mean, self.std)))
        return chosen.sample(randomness)

    def cooled(self, temperature: float) -> "GaussianMixture":
        """Return the density with its standard deviations multiplied by `temperature`."""
        return self._replace(std=self.std * temperature)

    def repeated(self, m: int) -> "GaussianMixture":
        """Return the density repeated along a new batch axis, [..., m], for m samples of each."""
        logits = self.logits.unsqueeze(-2).expand(*self.logits.shape[:-1], m, -1)
        both = (t.unsqueeze(-3).expand(*t.shape[:-2], m, -1, -1) for t in self[1:])
        return GaussianMixture(logits, *both)


Density = Gaussian | GaussianMixture


def normal_log_prob(x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Return log N(x; mean, diag(std^2)) [...] of x [..., D], summed over D, in float64."""
    x, mean, std = x.double(), mean.double(), std.double()
    terms = -0.5 * ((x - mean) / std) ** 2 - std.log() - 0.5 * math.log(2 * math.pi)
    return terms.sum(-1)


def at(density: Density, index) -> Density:
    """Return the density indexed along its batch axes."""
    return type(density)(*(t[index] for t in density))
