"""Gaussian diffusion of continuous tokens: cosine schedule, respacing, and the reverse kernels.

Symbols: abar_t, the fraction of the signal's variance left at time t (t = 0 has the least noise);
x_t = sqrt(abar_t) x + sqrt(1 - abar_t) e; eps, a network's estimate of the noise e.
Sources: DDPM, arXiv 2006.11239; improved DDPM, arXiv 2102.09672; MAR, arXiv 2406.11838.
"""

import math
from functools import lru_cache
from itertools import accumulate, repeat
from typing import NamedTuple

import torch
from torch import Tensor

VARIANCES = ("small", "large", "learned")


class DiffusionSchedule(NamedTuple):
    """A cosine noise schedule and its respacing.

    Attributes:
        noise_steps: Time steps of the cosine schedule.
        steps: Steps of the sampling chain, at evenly spaced times of the schedule.
        least_signal: Lower bound of abar. With 0, as published, the chain's first step multiplies
            an error of eps by sqrt(abar_before / abar), a factor of hundreds, and most drafts are
            rejected there.
        noisy_last: Whether the last step adds noise. Most samplers add none (False), but then the
            token has no density, and drafts cannot be verified.
    """

    noise_steps: int = 1000
    steps: int = 100
    least_signal: float = 0.0
    noisy_last: bool = True


class Kernel(NamedTuple):
    """One reverse step: a Gaussian of mean scale * (x - shift * eps).

    Attributes:
        time: The time step that the network is conditioned on.
        scale: Factor of the mean.
        shift: Factor of the noise estimate eps.
        small: Lower bound of the log variance, exact if all data are one point (DDPM section 3.2).
        large: Upper bound of the log variance, exact for data N(0, I). A learned log variance is
            interpolated between the two (improved DDPM Eq. 15).
    """

    time: int
    scale: float
    shift: float
    small: float
    large: float


@lru_cache
def signal(steps: int, least: float = 0.0) -> tuple[float, ...]:
    """Return the cosine schedule abar_t, t = 0 to steps - 1, each at least `least`.

    Source: improved DDPM Eq. 17, with beta at most 0.999.

    >>> [round(a, 3) for a in signal(2)]
    [0.494, 0.0]
    """

    def f(t: float) -> float:
        cosine = math.cos((t / steps + 0.008) / 1.008 * math.pi / 2) ** 2
        return least + (1 - least) * cosine

    abar, abars = 1.0, []
    for t in range(steps):
        abar *= 1 - min(1 - f(t + 1) / f(t), 0.999)
        abars.append(abar)
    return tuple(abars)


@lru_cache
def kernels(schedule: DiffusionSchedule) -> tuple[Kernel, ...]:
    """Return the reverse kernels of a sampling chain, from x_T down to the token.

    The last step's small variance would be 0; it uses the step before's, so the token has a
    density.
    """
    noise_steps, steps, least, noisy_last = schedule
    if not 2 <= steps <= noise_steps:
        raise ValueError(
            f"a chain of steps={steps} is not allowed: it must have 2 to {noise_steps}, the "
            "noise_steps of its schedule"
        )
    if not 0 <= least < 1:
        raise ValueError(f"least_signal={least} is not allowed: it must be in [0, 1)")
    # Sums of the stride, and not its multiples: they round as in the published respacing.
    strides = repeat((noise_steps - 1) / (steps - 1), steps - 1)
    times = [round(t) for t in accumulate(strides, initial=0.0)]
    abars = [signal(noise_steps, least)[t] for t in times]
    found = []
    for i, (time, abar) in enumerate(zip(times, abars)):
        alpha = abar / (abars[i - 1] if i else 1.0)
        beta = 1 - alpha
        j = max(i, 1)  # the last step of the chain, i = 0, uses the small variance of i = 1
        small = (1 - abars[j] / abars[j - 1]) * (1 - abars[j - 1]) / (1 - abars[j])
        variances = (math.log(small), math.log(beta))
        if i == 0 and not noisy_last:
            variances = (-math.inf, -math.inf)
        found.append(Kernel(time, alpha**-0.5, beta / (1 - abar) ** 0.5, *variances))
    return tuple(reversed(found))


def noised(x: Tensor, time: Tensor, noise: Tensor, schedule: DiffusionSchedule) -> Tensor:
    """Return noised tokens x_t = sqrt(abar_t) x + sqrt(1 - abar_t) e, [..., D] (DDPM Eq. 4).

    `x` and `noise` (e) are [..., D], `time` is t [...], in whole steps.
    """
    abars = signal(schedule.noise_steps, schedule.least_signal)
    abar = torch.tensor(abars, device=x.device, dtype=torch.float64)[time][..., None]
    return (abar.sqrt() * x + (1 - abar).sqrt() * noise).to(x.dtype)


def posterior(
    x: Tensor, noise: Tensor, raw: Tensor | None, kernel: Kernel, variance: str
) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation, [..., D], of a reverse kernel at x (DDPM Eq. 11).

    Args:
        x: The current state [..., D].
        noise: The noise in x, or a network's estimate of it, [..., D].
        raw: For a learned variance, its interpolation [..., D] from -1 (small) to 1 (large).
        kernel: The step.
        variance: One of `VARIANCES`.
    """
    mean = kernel.scale * (x - kernel.shift * noise)
    if kernel.large == -math.inf:  # a last step without noise; a share of -inf would be no number
        return mean, torch.zeros_like(mean)
    if variance == "learned":
        assert raw is not None
        share = (raw + 1) / 2
        return mean, (0.5 * (share * kernel.large + (1 - share) * kernel.small)).exp()
    return mean, torch.full_like(mean, math.exp(0.5 * getattr(kernel, variance)))
