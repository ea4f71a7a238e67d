"""DEER's two stages of diffusion-to-AR alignment (arXiv 2512.15176, section 3.1)."""

import torch
from torch import Tensor

from trainers.drafter import DrafterModule
from trainers.losses import deer
from trainers.losses.diffusion import denoising_weight, soft_nll


class Distillation(DrafterModule):
    """Stage I: continuations of teacher answers under noise (Eq. 1-2)."""

    def weight(self, batch: dict[str, Tensor]) -> Tensor:
        """See `BaseModule`."""
        return denoising_weight(batch["masked"], batch["rate"], batch["size"])

    def block_losses(self, logits: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """See `DrafterModule`."""
        return deer.distill(logits, batch["target"], batch["masked"], batch["rate"], batch["size"])


class Refinement(DrafterModule):
    """Stage II: fully masked suffixes, weighted towards the prefix (Eq. 3-4).

    alpha: 1.01 is stable at the published R of up to 96, 1.05 diverges there.
    soft: share of the loss that is taken against the target's distribution at each position
        instead of the one token that it drew (0: the paper's Eq. 4).
    """

    def __init__(self, *args, alpha: float, soft: float = 0.0, **kwargs):
        super().__init__(*args, **kwargs)
        if alpha < 1:
            raise ValueError(f"alpha={alpha} is not allowed: it must be at least 1")
        if not 0 <= soft <= 1:
            raise ValueError(f"soft={soft} is not allowed: it must be in [0, 1]")
        if soft and self.target is None:
            raise ValueError(f"soft={soft} needs the target: acceptance.prompts must not be 0")
        self.alpha, self.soft = alpha, soft

    def weight(self, batch: dict[str, Tensor]) -> Tensor:
        """See `BaseModule`."""
        return deer.refine_weight(batch["masked"], batch["size"], self.alpha)

    def block_losses(self, logits: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """See `DrafterModule`."""
        loss, weight = deer.refine(
            logits, batch["target"], batch["masked"], batch["size"], self.alpha
        )
        if self.soft:
            loss = torch.lerp(loss, soft_nll(logits, self.teacher_logits(batch)), self.soft)
        return loss, weight
