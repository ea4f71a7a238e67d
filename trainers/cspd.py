"""The modules of CSpD: a target over continuous tokens, and a drafter for it."""

import warnings

import torch
from torch import Tensor
from transformers import PreTrainedModel

from data.arguments import Share, Small, Weight
from models import patches
from models.denoising import kernels, noised
from trainers.base import DISTRIBUTIONS, BaseModule
from trainers.losses import cspd

NEAR = 0.01  # length of a difference of noise estimates, at which most drafts must be accepted


class Target(BaseModule):
    """The module of a causal patch transformer with a diffusion or a mixture head.

    A batch of B images of N patches has `patches` [B, N, D], `order` [B, N], `label` [B] (negative:
    no class). A diffusion head also reads R samples of the noise per patch: `time` [B, R, N] in
    [0, 1) and `noise` [B, R, N, D].
    """

    def weight(self, batch: dict[str, Tensor]) -> Tensor:
        return torch.ones_like(batch["order"], dtype=torch.float32)

    def losses(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return self.head_loss(self.hidden(self.network, batch), batch), self.weight(batch)

    def tokens(self, batch: dict[str, Tensor]) -> int:
        return batch["order"].numel()

    def hidden(self, network: patches.PatchTransformer, batch: dict[str, Tensor]) -> Tensor:
        """Return hidden states z [B, N, H] of every token, conditioned on those before it."""
        config, given = network.config, tuple(batch["patches"].shape[1:])
        if given != (config.tokens, config.dim):
            raise ValueError(
                f"the data has {given[0]} patches of {given[1]} numbers, the network takes "
                f"{config.tokens} of {config.dim}: size, channels and patch must fit"
            )
        label = batch["label"].where(batch["label"] >= 0, config.classes)
        return network(batch["patches"], label, batch["order"])

    def head_loss(self, z: Tensor, batch: dict[str, Tensor]) -> Tensor:
        """Return the head's own loss of every token, [B, N], from hidden states z [B, N, H]."""
        head, x = self.network.head, batch["patches"]
        if head.schedule is None:
            return cspd.mixture(head(z), x)
        time = (batch["time"] * head.schedule.noise_steps).long()  # [B, R, N]
        state = noised(x[:, None], time, batch["noise"], head.schedule)
        eps, raw = head(state, time, z[:, None])
        loss = cspd.denoising(eps, batch["noise"])
        if raw is not None:
            loss = loss + cspd.variational(eps, raw, batch["noise"], time, head.schedule)
        return loss.mean(1)

    def export_config(self) -> dict:
        return {"method": "sequential", "command": COMMAND}


class Draft(Target):
    """The module of a smaller patch transformer that drafts for a target.

    Args:
        target_name: The target's export.
        gamma: Tokens drafted per cycle.
        prefill: Share of the tokens, at the start, that the target generates alone.
        distillation: Weight of a loss that pulls the drafter's densities to the target's (mixtures,
            or denoising means of a diffusion head of fixed variance), because acceptance depends on
            their difference alone; 0 trains on the data alone. A learned variance is refused.
    """

    def __init__(
        self,
        *args,
        target_name: str,
        gamma: Small,
        prefill: Share = 0.0,
        distillation: Weight = 0.0,
        **kwargs,
    ):
        super().__init__(*args, **kwargs)
        head = self.network.head
        if distillation and head.schedule is not None and head.variance == "learned":
            raise ValueError(
                f"distillation={distillation} needs a fixed variance of the diffusion head: give "
                "distillation=0, or variance 'small' or 'large'"
            )
        if head.schedule is not None:
            kept = cspd.staying(head.schedule, head.variance, NEAR)
            if kept < 0.5:
                warnings.warn(
                    f"least_signal={head.schedule.least_signal:g}: hardly a draft will be "
                    f"accepted, as chains whose noise estimates differ by {NEAR} part with "
                    f"probability {1 - kept:.2f}: give target and drafter least_signal=0.001",
                    stacklevel=2,
                )
        self.target_name, self.gamma, self.prefill = target_name, gamma, prefill
        self.distillation = distillation

    @property
    def needs_target(self) -> frozenset[str]:
        """The target's densities, if they are distilled."""
        return frozenset([DISTRIBUTIONS] if self.distillation else [])

    @classmethod
    def load_target(cls, name: str, dtype: str, device_map: str | None = None) -> PreTrainedModel:
        """Load the target in float32, whatever `dtype` says: its densities are compared."""
        if device_map is not None:
            raise ValueError(
                f"device_map={device_map} is not allowed: only language models are spread over "
                "devices"
            )
        return patches.load(name).eval().requires_grad_(False)

    def check_target(self, name: str, recipe: str) -> None:
        patches.check_pair(patches.skeleton(name), self.network)

    def losses(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        z = self.hidden(self.network, batch)
        loss = self.head_loss(z, batch)
        if self.distillation:
            loss = loss + self.distillation * self.parting(z, batch)
        return loss, self.weight(batch)

    def parting(self, z: Tensor, batch: dict[str, Tensor]) -> Tensor:
        """Return -log P(coupled draws of drafter and target agree), [B, N], from z [B, N, H].

        For a mixture, P is of a token; for a diffusion head, the mean is over R chain states.
        """
        assert self.target is not None  # `needs_target` asks for it
        head, teacher = self.network.head, self.target.head
        if head.schedule is None:
            with torch.no_grad():
                wanted = teacher(self.hidden(self.target, batch))
                # The batch's numbers are fresh for every sample, and not used otherwise.
                drawn = Drawn(batch["time"].movedim(1, 2), batch["noise"].movedim(1, 2))
                x = wanted.repeated(batch["time"].shape[1]).sample(drawn)
            return cspd.mixture_parting(head(z), wanted, x)
        times = torch.tensor([k.time for k in kernels(head.schedule)], device=z.device)
        step = (batch["time"] * head.steps).long()
        state = noised(batch["patches"][:, None], times[step], batch["noise"], head.schedule)
        with torch.no_grad():
            z_target = self.hidden(self.target, batch)[:, None]
            wanted, _ = teacher(state, times[step], z_target)
        eps, _ = head(state, times[step], z[:, None])
        return cspd.parting(eps, wanted, step, head.schedule, head.variance).mean(1)

    def evaluate(self, batch: dict[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the loss and, with distillation, `parting` (its -log P)."""
        metrics = super().evaluate(batch)
        if self.distillation:
            weight = self.weight(batch)
            parting = self.parting(self.hidden(self.network, batch), batch)
            metrics["parting"] = ((parting * weight).sum(), weight.sum())
        return metrics

    def export_config(self) -> dict:
        return {
            "method": "cspd",
            "target": self.target_name,
            "gamma": self.gamma,
            "prefill": self.prefill,
            "command": COMMAND,
        }


class Drawn:
    """A `ContinuousRandomness` with numbers drawn before: uniform [...] and normal [..., D]."""

    def __init__(self, uniform: Tensor, normal: Tensor):
        self._uniform, self._normal = uniform, normal

    def categorical(self, probs: Tensor) -> Tensor:
        """Return the outcome [...] of probabilities [..., K] that the uniform numbers select."""
        below = probs.cumsum(-1) <= self._uniform[..., None]
        return below.sum(-1).clamp_max(probs.shape[-1] - 1)

    def normal(self, shape: tuple[int, ...]) -> Tensor:
        """Return the normal numbers, which must have this shape."""
        assert self._normal.shape == shape
        return self._normal


COMMAND = "python -m decoding.images model=<this folder or repository> classes=[0,1]"
