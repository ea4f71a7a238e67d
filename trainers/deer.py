"""DEER's two stages of diffusion-to-AR alignment (arXiv 2512.15176, section 3.1)."""

from torch import Tensor

from trainers.drafter import DrafterModule
from trainers.losses import deer
from trainers.losses.diffusion import denoising_weight


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
    """

    def __init__(self, *args, alpha: float, **kwargs):
        super().__init__(*args, **kwargs)
        if alpha < 1:
            raise ValueError(f"alpha={alpha} is not allowed: it must be at least 1")
        self.alpha = alpha

    def weight(self, batch: dict[str, Tensor]) -> Tensor:
        """See `BaseModule`."""
        return deer.refine_weight(batch["masked"], batch["size"], self.alpha)

    def block_losses(self, logits: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """See `DrafterModule`."""
        return deer.refine(logits, batch["target"], batch["masked"], batch["size"], self.alpha)
