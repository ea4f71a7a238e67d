"""Heads for continuous tokens: the density of a token given the transformer's hidden state.

A token is sampled by a chain of `steps` steps, and `kernel(i, x, z)` is the density of the next
state given the current state x. A diffusion head has many steps (MAR, arXiv 2406.11838); a Gaussian
mixture (GIVT, arXiv 2312.02116) has one, which does not depend on x.

Symbols: z [..., H], hidden states; x [..., D], states; guidance: the hidden states [..., H] without
a class and the guidance scale [...], or None.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, silu

from models.denoising import VARIANCES, DiffusionSchedule, kernels, posterior
from models.densities import Gaussian, GaussianMixture

Guidance = tuple[Tensor, Tensor] | None


def guided(out: Tensor, free: Tensor, scale: Tensor) -> Tensor:
    """Return free + scale (out - free), classifier-free guidance (arXiv 2207.12598).

    Outputs with the class (`out`) and without are [..., R], `scale` is [...].
    """
    return free + scale[..., None].to(out) * (out - free)


class MixtureHead(nn.Module):
    """A head whose density is a Gaussian mixture with diagonal covariances.

    Guidance acts on logits, means and log standard deviations, so the result is a mixture again.

    Args:
        hidden: H, size of the hidden states.
        dim: D, numbers per token.
        components: Gaussians of the mixture.
        least_std: Lower bound of every standard deviation; without it the likelihood is unbounded
            on data that lie on a lower-dimensional set.
    """

    steps, schedule = 1, None

    def __init__(self, hidden: int, dim: int, *, components: int, least_std: float = 0.01):
        super().__init__()
        self.dim, self.components, self.least_std = dim, components, float(least_std)
        self.out = nn.Linear(hidden, components * (1 + 2 * dim))

    def forward(self, z: Tensor, guidance: Guidance = None) -> GaussianMixture:
        """Return the density of the token, of batch shape [...], given z [..., H]."""
        raw = self.out(z)
        if guidance is not None:
            raw = guided(raw, self.out(guidance[0]), guidance[1])
        K = self.components
        logits, mean, log_std = raw.split([K, K * self.dim, K * self.dim], -1)
        shape = (*z.shape[:-1], K, self.dim)
        std = log_std.clamp(-10, 10).exp().view(shape) + self.least_std
        return GaussianMixture(logits, mean.view(shape), std)

    def kernel(self, i: int, x: Tensor, z: Tensor, guidance: Guidance = None) -> GaussianMixture:
        """Return the density of the token; the chain has one step, so `i` and `x` are unused."""
        return self(z, guidance)


class DiffusionHead(nn.Module):
    """A head whose chain is a reverse diffusion: a small MLP estimates the noise in a state.

    Args:
        hidden: H, size of the hidden states.
        dim: D, numbers per token.
        width: Hidden size of the MLP.
        depth: Residual blocks of the MLP.
        variance: 'small' or 'large' (fixed; then drafter and target have equal variances, and
            their chains can be coupled by reflection), or 'learned'.
        affine: Whether the blocks' layer norms have a scale and a shift, as in MAR's checkpoints.
        **schedule: Fields of `models.denoising.DiffusionSchedule`.
    """

    def __init__(
        self,
        hidden: int,
        dim: int,
        *,
        width: int,
        depth: int,
        variance: str = "small",
        affine: bool = False,
        **schedule,
    ):
        super().__init__()
        if variance not in VARIANCES:
            raise ValueError(f"unknown variance {variance!r}. Choose from {list(VARIANCES)}")
        self.dim, self.variance = dim, variance
        self.schedule = DiffusionSchedule(**schedule)
        self.respace()
        self.token, self.condition = nn.Linear(dim, width), nn.Linear(hidden, width)
        self.time = nn.Sequential(nn.Linear(256, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(_Block(width, affine) for _ in range(depth))
        self.last = _Modulated(width, 2)
        self.out = zero(nn.Linear(width, dim * (2 if variance == "learned" else 1)))

    def respace(self, **schedule) -> None:
        """Change the sampling chain, given as fields of `DiffusionSchedule`; the weights stay."""
        changed = self.schedule._replace(**schedule)
        self.steps, self.schedule = len(kernels(changed)), changed

    def forward(self, x: Tensor, time: Tensor, z: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the estimate eps and the raw variance (None unless learned), [..., D] each."""
        x = x.to(self.token.weight.dtype)
        c = silu(self.time(_waves(time).to(x.dtype)) + self.condition(z))
        h = self.token(x)
        for block in self.blocks:
            h = block(h, c)
        shift, scale = self.last(c)
        out = self.out(layer_norm(h, h.shape[-1:], eps=1e-6) * (1 + scale) + shift)
        if self.variance != "learned":
            return out, None
        return out[..., : self.dim], out[..., self.dim :]

    def kernel(self, i: int, x: Tensor, z: Tensor, guidance: Guidance = None) -> Gaussian:
        """Return the density of the next state; guidance acts on the noise alone, as in MAR."""
        kernel = kernels(self.schedule)[i]
        time = torch.full(x.shape[:-1], kernel.time, device=x.device)
        noise, raw = self(x, time, z)
        if guidance is not None:
            noise = guided(noise, self(x, time, guidance[0])[0], guidance[1])
        return Gaussian(*posterior(x, noise, raw, kernel, self.variance))


class _Modulated(nn.Module):
    """Modulation vectors of adaLN-Zero: `parts` linear maps of a condition, 0 at first."""

    def __init__(self, width: int, parts: int):
        super().__init__()
        self.parts, self.linear = parts, zero(nn.Linear(width, parts * width))

    def forward(self, c: Tensor) -> tuple[Tensor, ...]:
        return self.linear(c).chunk(self.parts, -1)


class _Block(nn.Module):
    """A residual MLP block with adaptive layer norm (DiT, arXiv 2212.09748, section 3.2)."""

    def __init__(self, width: int, affine: bool):
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=1e-6, elementwise_affine=affine)
        self.modulation = _Modulated(width, 3)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, h: Tensor, c: Tensor) -> Tensor:
        shift, scale, gate = self.modulation(c)
        return h + gate * self.mlp(self.norm(h) * (1 + scale) + shift)


def _waves(time: Tensor) -> Tensor:
    """Return the sinusoidal embedding [..., 256] of times [...]."""
    # A time of 1,000 multiplies what `exp` rounds differently on a GPU, so the CPU makes the rates.
    rates = (-math.log(10_000) * torch.arange(128, dtype=torch.float32) / 128).exp()
    angles = time[..., None] * rates.to(time.device)
    return torch.cat([angles.cos(), angles.sin()], -1)


def zero(linear: nn.Linear) -> nn.Linear:
    """Mark a layer for initialisation with zeros, by our models' `_init_weights`."""
    linear.starts_at_zero = True
    return linear


HEADS = {"diffusion": DiffusionHead, "mixture": MixtureHead}
