"""Losses for continuous tokens: likelihood, denoising, and agreement of drafter and target.

Symbols: x [..., D] a token, e its noise, eps the head's estimate of e, t the time step of the noise
schedule. Losses are unreduced, of shape [...].
"""

import math

import torch
from torch import Tensor

from models.denoising import DiffusionSchedule, kernels
from models.densities import GaussianMixture


def mixture(density: GaussianMixture, x: Tensor) -> Tensor:
    """Compute -log p(x) [...] of tokens [..., D], in nats (arXiv 2312.02116)."""
    return -density.log_prob(x)


def denoising(eps: Tensor, noise: Tensor) -> Tensor:
    """Compute the denoising loss |eps - e|^2 / D, [...] (DDPM Eq. 14; MAR Eq. 1).

    Example: eps [0, 0], noise [1, 3] -> 5.
    """
    return (eps.float() - noise.float()).square().mean(-1)


def variational(
    eps: Tensor, raw: Tensor, noise: Tensor, time: Tensor, schedule: DiffusionSchedule
) -> Tensor:
    """Compute the loss of a learned variance: KL of the true posterior from the head's kernel.

    Improved DDPM, arXiv 2102.09672, Eq. 16; the mean of the kernel gets no gradient. Returns the
    mean over D, [...], in nats, scaled by noise_steps / 1000, since the paper weights the sum over
    noise_steps by 0.001. It is the KL at t = 0 too, since the chain's last step has the variance of
    the step before it.

    Args:
        eps: Noise estimates [..., D].
        raw: Raw variances of the head [..., D], -1 for the small and 1 for the large variance.
        noise: e [..., D].
        time: Time steps t [...].
        schedule: The noise schedule.
    """
    table = _table(schedule._replace(steps=schedule.noise_steps, noisy_last=True), time.device)
    scale, shift, small, large = (column[time][..., None] for column in table)
    share = (raw.float() + 1) / 2
    log_variance = share * large + (1 - share) * small
    gap = (scale * shift * (eps.detach().float() - noise.float())).square()
    kl = 0.5 * (log_variance - small + ((small.exp() + gap) / log_variance.exp()) - 1)
    return kl.mean(-1) * schedule.noise_steps / 1000


def parting(
    eps: Tensor, teacher: Tensor, step: Tensor, schedule: DiffusionSchedule, variance: str
) -> Tensor:
    """Compute -log P(drafter and target chain stay equal in one coupled step) [...], in nats.

    P = 2 Phi(-|Delta| / 2 sigma), the overlap of two Gaussians, where Delta, the difference of
    their means, is scale * shift * (eps - teacher) if both chains are in the same state. The sum
    over a chain is -log P(the drafted token is accepted). Example: equal estimates give 0.

    Args:
        eps: The drafter's noise estimates [..., D].
        teacher: The target's noise estimates at the same states [..., D].
        step: Steps of the chain [...], 0 for the first (noisiest) one.
        schedule: The noise schedule of both.
        variance: 'small' or 'large', of both.
    """
    table = _table(schedule, step.device)
    # The table is sorted by rising noise, steps by falling noise.
    scale, shift, small, large = (column.flip(0)[step] for column in table)
    sigma = (0.5 * {"small": small, "large": large}[variance]).exp()
    squared = (eps.float() - teacher.float()).square().sum(-1)
    z = scale * shift / sigma * (squared + 1e-12).sqrt()  # a square root has no gradient at 0
    return -torch.special.log_ndtr(-z / 2) - math.log(2)


def staying(schedule: DiffusionSchedule, variance: str, difference: float) -> float:
    """Return the probability that two chains stay together to the end.

    In every step the length of the difference of their noise estimates is `difference`. A learned
    variance is taken as the large one, under which chains part least.
    """
    step = torch.arange(schedule.steps)
    eps = torch.full((schedule.steps, 1), difference)
    kind = "large" if variance == "learned" else variance
    return parting(eps, torch.zeros_like(eps), step, schedule, kind).sum().neg().exp().item()


def mixture_parting(draft: GaussianMixture, target: GaussianMixture, x: Tensor) -> Tensor:
    """Estimate -log P(a drafted token is accepted) [...], in nats, from samples of the target.

    P = int min(q, p) = E_p[min(1, q / p)], the mean over S samples. Equal densities give 0.

    Args:
        draft: The drafter's densities q, of batch shape [...].
        target: The target's densities p, of batch shape [...].
        x: Samples of the target [..., S, D].
    """
    S = x.shape[-2]
    log_ratio = draft.repeated(S).log_prob(x) - target.repeated(S).log_prob(x)
    return math.log(S) - log_ratio.clamp_max(0).logsumexp(-1)


def _table(schedule: DiffusionSchedule, device) -> tuple[Tensor, ...]:
    """Return scale, shift, small and large of every kernel, by rising time: [steps] each."""
    found = [k[1:] for k in reversed(kernels(schedule))]
    return tuple(torch.tensor(column, device=device) for column in zip(*found))
