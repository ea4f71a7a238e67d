"""Heads that give the density of a continuous token from what the transformer says of it.

One interface: a token is made by a chain of `steps` steps, and `kernel(i, x, z)` is the density of
the next state given the present one, x. A diffusion head has many steps (MAR, arXiv 2406.11838); a
Gaussian mixture (GIVT, arXiv 2312.02116) has one, which does not look at x.

Symbols: z [..., H] hidden states, x [..., D]; guidance: (z of no class, scale [...]), or None.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from models.denoising import VARIANCES, DiffusionSchedule, kernels, posterior
from models.densities import Gaussian, GaussianMixture

Guidance = tuple[Tensor, Tensor] | None


def guided(out: Tensor, free: Tensor, scale: Tensor) -> Tensor:
    """Guidance without a classifier (arXiv 2207.12598): out [..., R] led away from no class's."""
    return free + scale[..., None].to(out) * (out - free)


class MixtureHead(nn.Module):
    """A mixture of `components` Gaussians with diagonal covariances.

    least_std: no standard deviation is smaller; data on a lower-dimensional set has no density.
    Guidance acts on logits, means and log standard deviations, so a guided head is a mixture too.
    """

    steps, schedule = 1, None

    def __init__(self, hidden: int, dim: int, *, components: int, least_std: float = 0.01):
        super().__init__()
        self.dim, self.components, self.least_std = dim, components, least_std
        self.out = nn.Linear(hidden, components * (1 + 2 * dim))

    def forward(self, z: Tensor, guidance: Guidance = None) -> GaussianMixture:
        """The token's density."""
        raw = self.out(z)
        if guidance is not None:
            raw = guided(raw, self.out(guidance[0]), guidance[1])
        K = self.components
        logits, mean, log_std = raw.split([K, K * self.dim, K * self.dim], -1)
        shape = (*z.shape[:-1], K, self.dim)
        std = log_std.clamp(-10, 10).exp().view(shape) + self.least_std
        return GaussianMixture(logits, mean.view(shape), std)

    def kernel(self, i: int, x: Tensor, z: Tensor, guidance: Guidance = None) -> GaussianMixture:
        """See the module."""
        return self(z, guidance)


class DiffusionHead(nn.Module):
    """A small MLP that estimates the noise in a token; its chain is the reversed diffusion.

    width, depth: of the MLP. variance: 'small' or 'large' (fixed, the same for every model, so that
    drafts are coupled by reflection) or 'learned'. schedule: keys of
    `models.denoising.DiffusionSchedule`.
    """

    def __init__(
        self,
        hidden: int,
        dim: int,
        *,
        width: int,
        depth: int,
        variance: str = "small",
        **schedule,
    ):
        super().__init__()
        if variance not in VARIANCES:
            raise ValueError(f"unknown variance {variance!r}. Choose from {list(VARIANCES)}")
        self.dim, self.variance = dim, variance
        self.schedule = DiffusionSchedule(**schedule)
        self.steps = len(kernels(self.schedule))
        self.token, self.condition = nn.Linear(dim, width), nn.Linear(hidden, width)
        self.time = nn.Sequential(nn.Linear(256, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(_Block(width) for _ in range(depth))
        self.last = _Modulated(width, 2)
        self.out = zero(nn.Linear(width, dim * (2 if variance == "learned" else 1)))

    def forward(self, x: Tensor, time: Tensor, z: Tensor) -> tuple[Tensor, Tensor | None]:
        """(eps, raw variance or None), each [..., D], at times [...]."""
        c = silu(self.time(_waves(time).to(x.dtype)) + self.condition(z))
        h = self.token(x)
        for block in self.blocks:
            h = block(h, c)
        shift, scale = self.last(c)
        out = self.out(_normed(h, shift, scale))
        if self.variance != "learned":
            return out, None
        return out[..., : self.dim], out[..., self.dim :]

    def kernel(self, i: int, x: Tensor, z: Tensor, guidance: Guidance = None) -> Gaussian:
        """See the module. Guidance acts on the noise's estimate alone, as MAR's does."""
        kernel = kernels(self.schedule)[i]
        time = torch.full(x.shape[:-1], kernel.time, device=x.device)
        noise, raw = self(x, time, z)
        if guidance is not None:
            noise = guided(noise, self(x, time, guidance[0])[0], guidance[1])
        return Gaussian(*posterior(x, noise, raw, kernel, self.variance))


class _Modulated(nn.Module):
    """`parts` vectors of modulation from a condition, all 0 at the start (adaLN-Zero)."""

    def __init__(self, width: int, parts: int):
        super().__init__()
        self.parts, self.linear = parts, zero(nn.Linear(width, parts * width))

    def forward(self, c: Tensor) -> tuple[Tensor, ...]:
        return self.linear(c).chunk(self.parts, -1)


class _Block(nn.Module):
    """A residual MLP block with adaptive layer norm (DiT, arXiv 2212.09748, section 3.2)."""

    def __init__(self, width: int):
        super().__init__()
        self.modulation = _Modulated(width, 3)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, h: Tensor, c: Tensor) -> Tensor:
        shift, scale, gate = self.modulation(c)
        return h + gate * self.mlp(_normed(h, shift, scale))


def _normed(h: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return nn.functional.layer_norm(h, h.shape[-1:], eps=1e-6) * (1 + scale) + shift


def _waves(time: Tensor) -> Tensor:
    """Sinusoidal embedding [..., 256] of times [...]."""
    rates = 10_000 ** (-torch.arange(128, device=time.device) / 128)
    angles = time[..., None] * rates
    return torch.cat([angles.cos(), angles.sin()], -1)


def zero(linear: nn.Linear) -> nn.Linear:
    """Mark a layer to start at 0 (`models.patches` initialises)."""
    linear.starts_at_zero = True
    return linear


HEADS = {"diffusion": DiffusionHead, "mixture": MixtureHead}
