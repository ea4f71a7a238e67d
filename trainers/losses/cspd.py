"""Losses of heads that give the density of a continuous token, and of drafts that should agree.

Symbols: x [..., D] a token, e its noise, eps what the head estimates, t the time of the noise
schedule. Everything is unreduced over the leading axes.
"""

import math

import torch
from torch import Tensor

from models.denoising import DiffusionSchedule, kernels
from models.densities import GaussianMixture


def mixture(density: GaussianMixture, x: Tensor) -> Tensor:
    """-log p(x) of a token, in nats (GIVT, arXiv 2312.02116): [...]."""
    return -density.log_prob(x)


def denoising(eps: Tensor, noise: Tensor) -> Tensor:
    """|eps - e|^2, the mean over the token's numbers (DDPM Eq. 14; MAR Eq. 1): [...].

    Example: eps [0, 0], noise [1, 3] -> 5.
    """
    return (eps.float() - noise.float()).square().mean(-1)


def variational(
    eps: Tensor, raw: Tensor, noise: Tensor, time: Tensor, schedule: DiffusionSchedule
) -> Tensor:
    """The bound's term for a learned variance, the mean over the token's numbers: [...].

    Improved DDPM, arXiv 2102.09672, Eq. 16: KL of the true posterior to the head's kernel, whose
    mean learns nothing from it; times noise_steps / 1000, its weight there being 0.001 of the sum.
    At t = 0 too: the chain's last step keeps the noise of the one before it.
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
    """-log P(a coupled step keeps draft and target together), at one state: [...].

    P = 2 Phi(-|Delta| / 2 sigma), Delta the difference of the kernels' means, which at one state is
    scale * shift * (eps - teacher). The sum over a chain's steps is -log of the probability that
    the chains are never parted. eps, teacher [..., D] at steps [...] of the chain, 0 the first.
    Example: equal estimates -> 0.
    """
    table = _table(schedule, step.device)
    # The table runs from the least noise up, steps from the most down.
    scale, shift, small, large = (column.flip(0)[step] for column in table)
    sigma = (0.5 * {"small": small, "large": large}[variance]).exp()
    squared = (eps.float() - teacher.float()).square().sum(-1)
    z = scale * shift / sigma * (squared + 1e-12).sqrt()  # the root of 0 has no gradient
    return -torch.special.log_ndtr(-z / 2) - math.log(2)


def mixture_parting(draft: GaussianMixture, target: GaussianMixture, x: Tensor) -> Tensor:
    """-log P(a draft stands), the overlap of two densities, from draws x [..., S, D] of the target.

    P = int min(q, p) = E_p[min(1, q / p)], here the mean over S draws: [...].
    Example: equal densities -> 0.
    """
    S = x.shape[-2]
    log_ratio = draft.repeated(S).log_prob(x) - target.repeated(S).log_prob(x)
    return math.log(S) - log_ratio.clamp_max(0).logsumexp(-1)


def _table(schedule: DiffusionSchedule, device) -> tuple[Tensor, ...]:
    """scale, shift, small and large of every kernel, by rising time: [steps] each."""
    found = [k[1:] for k in reversed(kernels(schedule))]
    return tuple(torch.tensor(column, device=device) for column in zip(*found))
