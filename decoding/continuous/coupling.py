"""Speculative decoding of continuous tokens: accept, residual and coupling, on densities.

Symbols: q the draft's density, p the target's, both of batch shape [B, ...] (`models.densities`);
x [B, ..., D] drawn from q. Every rule returns (y, together): tokens y [B, ..., D], and whether
each is x itself. `couple`, by `maximal` or `reflection`, is lossless: y has the law p, and P(y = x)
is the largest possible, the overlap of p and q. `relaxed` is the published rule, and lossy.
"""

import torch
from torch import Tensor

from decoding.engine.randomness import ContinuousRandomness
from models.densities import Density, Gaussian, at

FIRST, MOST = 8, 256  # draws of the first round of a residual loop, and of a late one


def acceptance_probability(x: Tensor, q: Density, p: Density) -> Tensor:
    """min(1, p(x) / q(x)): [B, ...]. CSpD section 3.2, as Leviathan et al., arXiv 2211.17192."""
    return (p.log_prob(x) - q.log_prob(x)).exp().clamp_max(1)


def couple(
    x: Tensor, q: Density, p: Density, randomness: ContinuousRandomness, in_order: bool = False
) -> tuple[Tensor, Tensor]:
    """The maximal coupling of any two densities.

    in_order: tokens along the last axis of the batch shape are used up to the first that is not x
    only; behind it no residual is drawn, and y means nothing.
    """
    gaussian = isinstance(q, Gaussian) and isinstance(p, Gaussian)
    return (reflection if gaussian else maximal)(x, q, p, randomness, in_order)


def maximal(
    x: Tensor, q: Density, p: Density, randomness: ContinuousRandomness, in_order: bool = False
) -> tuple[Tensor, Tensor]:
    """Accept x with min(1, p/q), else draw from the residual: for any two densities."""
    together = randomness.accept(acceptance_probability(x, q, p))
    y = residual(p, q, randomness, _parted(together, in_order))
    return torch.where(together[..., None], x, y), together


def residual(p: Density, q: Density, randomness: ContinuousRandomness, wanted: Tensor) -> Tensor:
    """Draws of (p - q)+ normalised where `wanted` (bool [B, ...]), 0 elsewhere: [B, ..., D].

    CSpD Eq. 6 and 10: y from p stays with max(0, 1 - q(y)/p(y)), until one does. The loop has no
    cap, and needs none: a draft is rejected with probability 1 - b, and then 1 / (1 - b) draws are
    expected, so that a token costs one draw on average whatever the overlap b. It asks no network.
    """
    x = p.mean.new_zeros(*wanted.shape, p.mean.shape[-1])
    randomness, m = randomness.split(), FIRST  # its own: rows need different numbers of rounds
    left, here = wanted, torch.arange(len(wanted), device=wanted.device)
    while True:
        rest = left.reshape(len(left), left[:1].numel()).any(1).nonzero().flatten()
        here, left, p, q = here[rest], left[rest], at(p, rest), at(q, rest)
        if not len(here):
            return x
        randomness.select(rest)
        many_p, many_q = p.repeated(m), q.repeated(m)
        y = many_p.sample(randomness)
        stays = randomness.accept(-torch.expm1(many_q.log_prob(y) - many_p.log_prob(y)))
        found = stays.any(-1) & left
        x[here] = torch.where(found[..., None], _first(y, stays), x[here])
        left, m = left & ~found, min(4 * m, MOST)


def reflection(
    x: Tensor, q: Gaussian, p: Gaussian, randomness: ContinuousRandomness, in_order: bool = False
) -> tuple[Tensor, Tensor]:
    """`maximal` of two Gaussians; where their variances are equal a rejection needs no loop.

    Reflection maximal coupling (Bou-Rabee, Eberle and Zimmer, arXiv 1805.00452, section 2): with
    x = mean_q + std e and z = (mean_q - mean_p) / std, a rejected x becomes mean_p + std e',
    e' the mirror image of e at the hyperplane orthogonal to z. Accepted: 2 Phi(-|z| / 2).
    """
    together = randomness.accept(acceptance_probability(x, q, p))
    equal = (q.std == p.std).all(-1)
    mirrored = mirror(x, q, p)
    if equal.all():
        return torch.where(together[..., None], x, mirrored), together
    drawn = residual(p, q, randomness, _parted(together, in_order) & ~equal)
    y = torch.where(equal[..., None], mirrored, drawn)
    return torch.where(together[..., None], x, y), together


def _parted(together: Tensor, in_order: bool) -> Tensor:
    """Where y is needed and is not x."""
    parted = ~together
    return parted & (parted.cumsum(-1) == 1) if in_order else parted


def mirror(x: Tensor, q: Gaussian, p: Gaussian) -> Tensor:
    """x's noise under q, mirrored at the hyperplane between the means, under p: [B, ..., D].

    >>> one = torch.ones(1)
    >>> mirror(torch.tensor([0.5]), Gaussian(0 * one, one), Gaussian(2 * one, one)).item()
    1.5
    """
    noise, z = (x - q.mean) / q.std, (q.mean - p.mean) / p.std
    length = (z * z).sum(-1, keepdim=True).clamp_min(torch.finfo(z.dtype).tiny)
    return p.mean + p.std * (noise - 2 * z * ((z * noise).sum(-1, keepdim=True) / length))


def together_probability(q: Gaussian, p: Gaussian) -> Tensor:
    """2 Phi(-|z| / 2), the overlap of two Gaussians of equal variances: [...]."""
    z = ((q.mean - p.mean) / p.std).double().norm(dim=-1)
    return 2 * torch.special.ndtr(-z / 2)


def relaxed(
    x: Tensor,
    q: Density,
    p: Density,
    randomness: ContinuousRandomness,
    *,
    log_sigma: Tensor | float = 0.0,
    inner_temperature: float = 1.0,
    tries: int = 64,
) -> tuple[Tensor, Tensor]:
    """LOSSY, the published rule: CSpD Eq. 5 to 11, for comparison only. y has not the law p.

    log_sigma: log of Eq. 4's factor Sigma, which does not belong in the ratio: shared noise has the
    same law under both models. inner_temperature: the authors' program divides the log-ratio by
    42, so that nearly everything is accepted; 1 is the paper's rule. tries: the residual loop is
    capped, as it must be where Sigma p <= q; then the last draw of p is taken.
    """
    log_ratio = log_sigma + p.log_prob(x) - q.log_prob(x)
    together = randomness.accept((log_ratio / inner_temperature).exp().clamp_max(1))
    many_p, many_q = p.repeated(tries), q.repeated(tries)
    y = many_p.sample(randomness)
    shift = log_sigma[..., None] if isinstance(log_sigma, Tensor) else log_sigma
    stays = randomness.accept(-torch.expm1(many_q.log_prob(y) - many_p.log_prob(y) - shift))
    stays[..., -1] = True
    return torch.where(together[..., None], x, _first(y, stays)), together


def _first(y: Tensor, stays: Tensor) -> Tensor:
    """The first of y [..., m, D] that stays [..., m] (any, where none does): [..., D]."""
    first = stays.int().argmax(-1)[..., None, None]
    return y.gather(-2, first.expand(*first.shape[:-1], y.shape[-1])).squeeze(-2)
