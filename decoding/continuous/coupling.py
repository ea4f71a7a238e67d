"""Speculative sampling of continuous tokens: maximal couplings of a draft and a target density.

Symbols: q is the drafter's density, p the target's, both of batch shape [B, ...]
(`models.densities`); x [B, ..., D] was drawn from q. Every rule returns tokens y [B, ..., D] and
`accepted`, bool [B, ...], where y = x. `couple`, by `maximal` or `reflection`, is lossless: y has
the distribution p, and P(y = x) is the overlap of p and q, the largest possible. `relaxed` is the
published rule, which is lossy.
"""

import torch
from torch import Tensor

from decoding.engine.randomness import ContinuousRandomness
from models.densities import Density, Gaussian, at

FIRST, MAX_DRAWS = 8, 256  # draws per round of a residual loop: in the first round, and at most


def acceptance_probability(x: Tensor, q: Density, p: Density) -> Tensor:
    """Return min(1, p(x) / q(x)), [B, ...] (CSpD, section 3.2; Leviathan et al., 2211.17192)."""
    return (p.log_prob(x) - q.log_prob(x)).exp().clamp_max(1)


def couple(
    x: Tensor, q: Density, p: Density, randomness: ContinuousRandomness, in_order: bool = False
) -> tuple[Tensor, Tensor]:
    """Couple two densities maximally: by `reflection` of Gaussians, else by `maximal`.

    With `in_order` only tokens up to the first rejection along the last batch axis are used; after
    it no residual is drawn, and y is undefined. Returns y [B, ..., D], distributed as p, and
    accepted [B, ...].
    """
    if isinstance(q, Gaussian) and isinstance(p, Gaussian):
        return reflection(x, q, p, randomness, in_order)
    return maximal(x, q, p, randomness, in_order)


def maximal(
    x: Tensor, q: Density, p: Density, randomness: ContinuousRandomness, in_order: bool = False
) -> tuple[Tensor, Tensor]:
    """Accept x with min(1, p/q), else draw from the residual by rejection sampling (`couple`)."""
    accepted = randomness.accept(acceptance_probability(x, q, p))
    y = residual(p, q, randomness, _rejected(accepted, in_order))
    return torch.where(accepted[..., None], x, y), accepted


def residual(p: Density, q: Density, randomness: ContinuousRandomness, wanted: Tensor) -> Tensor:
    """Draw [B, ..., D] from the residual distribution, (p - q)+ normalised (CSpD, Eq. 6 and 10).

    A draw y from p is kept with probability max(0, 1 - q(y)/p(y)), else drawn again. The loop needs
    no cap: with overlap b a draft is rejected with probability 1 - b, after which 1 / (1 - b) draws
    are expected, so a token costs one draw on average for any b. No network runs. It draws only
    where `wanted`, bool [B, ...]; elsewhere the result is 0.
    """
    x = p.mean.new_zeros(*wanted.shape, p.mean.shape[-1])
    randomness, m = randomness.split(), FIRST  # split: rows need different numbers of rounds
    left, here = wanted, torch.arange(len(wanted), device=wanted.device)
    while True:
        rest = left.reshape(len(left), left[:1].numel()).any(1).nonzero().flatten()
        here, left, p, q = here[rest], left[rest], at(p, rest), at(q, rest)
        if not len(here):
            return x
        randomness.select(rest)
        many_p, many_q = p.repeated(m), q.repeated(m)
        y = many_p.sample(randomness)
        kept = randomness.accept(-torch.expm1(many_q.log_prob(y) - many_p.log_prob(y)))
        found = kept.any(-1) & left
        x[here] = torch.where(found[..., None], _first(y, kept), x[here])
        left, m = left & ~found, min(4 * m, MAX_DRAWS)


def reflection(
    x: Tensor, q: Gaussian, p: Gaussian, randomness: ContinuousRandomness, in_order: bool = False
) -> tuple[Tensor, Tensor]:
    """Couple two Gaussians by reflection; no loop is needed where variances are equal.

    Source: Bou-Rabee, Eberle and Zimmer, arXiv 1805.00452, section 2. With x = mean_q + std e and z
    = (mean_q - mean_p) / std, a rejected x becomes mean_p + std e', where e' is the mirror image of
    e at the hyperplane orthogonal to z. The acceptance probability is 2 Phi(-|z| / 2).
    """
    accepted = randomness.accept(acceptance_probability(x, q, p))
    equal = (q.std == p.std).all(-1)
    mirrored = mirror(x, q, p)
    if equal.all():
        return torch.where(accepted[..., None], x, mirrored), accepted
    drawn = residual(p, q, randomness, _rejected(accepted, in_order) & ~equal)
    y = torch.where(equal[..., None], mirrored, drawn)
    return torch.where(accepted[..., None], x, y), accepted


def _rejected(accepted: Tensor, in_order: bool) -> Tensor:
    """Return where y is needed: at every rejection, or at the first along the last axis."""
    rejected = ~accepted
    return rejected & (rejected.cumsum(-1) == 1) if in_order else rejected


def mirror(x: Tensor, q: Gaussian, p: Gaussian) -> Tensor:
    """Mirror x's noise under q at the plane between the means: a sample of p.

    >>> one = torch.ones(1)
    >>> mirror(torch.tensor([0.5]), Gaussian(0 * one, one), Gaussian(2 * one, one)).item()
    1.5
    """
    noise, z = (x - q.mean) / q.std, (q.mean - p.mean) / p.std
    length = (z * z).sum(-1, keepdim=True).clamp_min(torch.finfo(z.dtype).tiny)
    return p.mean + p.std * (noise - 2 * z * ((z * noise).sum(-1, keepdim=True) / length))


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
    """Apply the published, LOSSY rule (CSpD, Eq. 5 to 11): y does not follow p.

    Args:
        x, q, p, randomness: See `couple`.
        log_sigma: Log of the factor Sigma of Eq. 4, [B, ...] or a number. It does not belong in the
            ratio, since shared noise has the same distribution under both models.
        inner_temperature: Divides the deviations x - mean of both densities, not their
            log-determinants. 1 in the paper, 42 in the authors' code, which accepts nearly every
            draft.
        tries: Cap of the residual loop, needed because Sigma p <= q is possible; the last draw from
            p is then returned.
    """
    # Wider by the same factor, both log-determinants grow alike, and their difference stays.
    wide_p, wide_q = p.cooled(inner_temperature), q.cooled(inner_temperature)
    log_ratio = log_sigma + wide_p.log_prob(x) - wide_q.log_prob(x)
    accepted = randomness.accept(log_ratio.exp().clamp_max(1))
    many_p, many_q = p.repeated(tries), q.repeated(tries)
    y = many_p.sample(randomness)
    shift = log_sigma[..., None] if isinstance(log_sigma, Tensor) else log_sigma
    kept = randomness.accept(-torch.expm1(many_q.log_prob(y) - many_p.log_prob(y) - shift))
    kept[..., -1] = True
    return torch.where(accepted[..., None], x, _first(y, kept)), accepted


def _first(y: Tensor, kept: Tensor) -> Tensor:
    """Return the first y [..., m, D] that is kept [..., m], or the first of all: [..., D]."""
    first = kept.int().argmax(-1)[..., None, None]
    return y.gather(-2, first.expand(*first.shape[:-1], y.shape[-1])).squeeze(-2)
