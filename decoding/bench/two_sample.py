"""Two-sample tests: energy distance with a permutation test, and the Fréchet distance."""

import torch
from torch import Generator, Tensor


def energy_distance(a: Tensor, b: Tensor) -> float:
    """The energy distance 2 E|A - B| - E|A - A'| - E|B - B'| of two sets of samples.

    Székely and Rizzo, Energy statistics, J. Statist. Plann. Inference 143 (2013), Eq. 5. It is 0
    only if the distributions are equal.

    Args:
        a: Samples [n, ...].
        b: Samples [m, ...] of the same shape.

    Returns:
        The distance, in the samples' unit.

    >>> energy_distance(torch.zeros(2, 1), torch.ones(2, 1))
    2.0
    """
    a, b = a.flatten(1).double(), b.flatten(1).double()
    within = torch.cdist(a, a).mean() + torch.cdist(b, b).mean()
    return (2 * torch.cdist(a, b).mean() - within).item()


def permutation_test(
    a: Tensor, b: Tensor, permutations: int = 199, seed: int = 0
) -> tuple[float, float]:
    """The energy distance of two sets of samples, and its p-value under shuffled labels.

    p = (1 + shuffles with at least this distance) / (1 + permutations), so at least
    1 / (1 + permutations).

    Args:
        a: Samples [n, ...].
        b: Samples [m, ...] of the same shape.
        permutations: Number of shuffles.
        seed: Of the shuffles.

    Returns:
        (distance, p).
    """
    n, m = len(a), len(b)
    pooled = torch.cat([a, b]).flatten(1).double()
    distance = torch.cdist(pooled, pooled)
    generator = Generator().manual_seed(seed)
    shuffled = [torch.randperm(n + m, generator=generator) < n for _ in range(permutations)]
    labels = torch.stack([torch.arange(n + m) < n, *shuffled]).to(distance)
    sums = labels @ distance
    aa = (sums * labels).sum(-1)
    ab = sums.sum(-1) - aa
    bb = distance.sum() - 2 * ab - aa
    energy = 2 * ab / (n * m) - aa / n**2 - bb / m**2
    p = (1 + (energy[1:] >= energy[0] * (1 - 1e-9)).sum().item()) / (1 + permutations)
    return energy[0].item(), p


def frechet_distance(a: Tensor, b: Tensor) -> float:
    """The squared Fréchet distance |m_a - m_b|^2 + tr(C_a + C_b - 2 (C_a C_b)^(1/2)) of features.

    Heusel et al., arXiv 1706.08500, Eq. 6. Example: equal covariances, means 3 apart -> 9.

    Args:
        a: Features [n, F].
        b: Features [m, F].
    """
    a, b = a.double(), b.double()
    one, other = torch.atleast_2d(a.T.cov()), torch.atleast_2d(b.T.cov())
    # tr (C_a C_b)^(1/2) by the symmetric C_a^(1/2) C_b C_a^(1/2), which has the same eigenvalues.
    values, vectors = torch.linalg.eigh(one)
    root = vectors * values.clamp_min(0).sqrt() @ vectors.T
    cross = torch.linalg.eigvalsh(root @ other @ root).clamp_min(0).sqrt().sum()
    gap = (a.mean(0) - b.mean(0)).square().sum()
    return (gap + one.trace() + other.trace() - 2 * cross).item()
