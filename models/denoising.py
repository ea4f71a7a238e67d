"""The Gaussian diffusion of a token: cosine schedule, respacing, and the kernels of its reversal.

Symbols: abar_t, the share of the signal's variance that is left at time t (0 the least noise, of
`steps`); x_t = sqrt(abar_t) x + sqrt(1 - abar_t) e; eps, a network's estimate of the noise e.
Sources: DDPM, arXiv 2006.11239; improved DDPM, arXiv 2102.09672; MAR, arXiv 2406.11838.
"""

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

VARIANCES = ("small", "large", "learned")


class DiffusionSchedule(NamedTuple):
    """noise_steps: of the cosine schedule. steps: of the chain, at times spread evenly over it.

    least_signal: abar never falls below it. As published it is 0; then the first step of the chain
    multiplies an error of eps by sqrt(abar_before / abar), hundreds, and drafts part there.
    noisy_last: False ends without noise, as most samplers do; then a token has no density.
    """

    noise_steps: int = 1000
    steps: int = 100
    least_signal: float = 0.0
    noisy_last: bool = True


class Kernel(NamedTuple):
    """One step of the reversed chain: mean = scale * (x - shift * eps), and its variances' logs.

    time: what the network is told. small, large: log of the variance if the token were one point,
    and if it were white noise (DDPM section 3.2); a learned one is between (improved DDPM Eq. 15).
    """

    time: int
    scale: float
    shift: float
    small: float
    large: float


@lru_cache
def signal(steps: int, least: float = 0.0) -> tuple[float, ...]:
    """abar_t of the cosine schedule, t = 0 to steps - 1. Improved DDPM Eq. 17, beta at most 0.999.

    >>> [round(a, 3) for a in signal(2)]
    [0.494, 0.0]
    """

    def f(t: float) -> float:
        cosine = math.cos((t / steps + 0.008) / 1.008 * math.pi / 2) ** 2
        return least + (1 - least) * cosine

    abar, found = 1.0, []
    for t in range(steps):
        abar *= 1 - min(1 - f(t + 1) / f(t), 0.999)
        found.append(abar)
    return tuple(found)


@lru_cache
def kernels(schedule: DiffusionSchedule) -> tuple[Kernel, ...]:
    """The kernels of a chain from x_T down.

    The last kernel's small variance would be 0. It takes the variance of the step before it, so
    that the token has a density.
    """
    noise_steps, steps, least, noisy_last = schedule
    if not 2 <= steps <= noise_steps:
        raise ValueError(
            f"a chain of steps={steps} is not allowed: it must have 2 to {noise_steps}, the "
            "noise_steps of its schedule"
        )
    if not 0 <= least < 1:
        raise ValueError(f"least_signal={least} is not allowed: it must be in [0, 1)")
    times = [round(i * (noise_steps - 1) / (steps - 1)) for i in range(steps)]
    abars = [signal(noise_steps, least)[t] for t in times]
    found = []
    for i, (time, abar) in enumerate(zip(times, abars)):
        alpha = abar / (abars[i - 1] if i else 1.0)
        beta = 1 - alpha
        j = max(i, 1)  # the chain's last step, i = 0, has the small variance of its neighbour
        small = (1 - abars[j] / abars[j - 1]) * (1 - abars[j - 1]) / (1 - abars[j])
        variances = (math.log(small), math.log(beta))
        if i == 0 and not noisy_last:
            variances = (-math.inf, -math.inf)
        found.append(Kernel(time, alpha**-0.5, beta / (1 - abar) ** 0.5, *variances))
    return tuple(reversed(found))


def noised(x: Tensor, time: Tensor, noise: Tensor, schedule: DiffusionSchedule) -> Tensor:
    """x_t of tokens x [..., D] at times [...]: DDPM Eq. 4."""
    abars = signal(schedule.noise_steps, schedule.least_signal)
    abar = torch.tensor(abars, device=x.device, dtype=torch.float64)[time][..., None]
    return (abar.sqrt() * x + (1 - abar).sqrt() * noise).to(x.dtype)


def posterior(
    x: Tensor, noise: Tensor, raw: Tensor | None, kernel: Kernel, variance: str
) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation [..., D] of the kernel at x, given (an estimate of) its noise.

    DDPM Eq. 11. variance: one of `VARIANCES`; raw: [..., D], -1 is small and 1 large, if learned.
    """
    mean = kernel.scale * (x - kernel.shift * noise)
    if variance == "learned":
        share = (raw + 1) / 2
        return mean, (0.5 * (share * kernel.large + (1 - share) * kernel.small)).exp()
    return mean, torch.full_like(mean, math.exp(0.5 * getattr(kernel, variance)))
