"""DEER's two stages of diffusion-to-AR alignment (arXiv 2512.15176, section 3.1)."""

from torch import Tensor

from trainers.drafter import DrafterModule, TargetStates
from trainers.losses import deer
from trainers.losses.diffusion import denoising_weight
from trainers.taught import TaughtModule


class Distillation(DrafterModule):
    """The module of stage I: masked continuations of teacher answers (Eq. 1-2)."""

    def block_weight(self, batch: dict[str, Tensor]) -> Tensor:
        return denoising_weight(batch["masked"], batch["rate"], batch["size"])

    def block_losses(
        self, logits: Tensor, batch: dict[str, Tensor], states: TargetStates | None
    ) -> tuple[Tensor, Tensor]:
        return deer.distill(logits, batch["target"], batch["masked"], batch["rate"], batch["size"])


class Refinement(TaughtModule):
    """The module of stage II: fully masked suffixes, weighted towards the prefix (Eq. 3-4).

    With soft=0 it is the paper's Eq. 4. Stage I cannot learn distributions: there a token's context
    holds later ones, too.

    Args:
        alpha: Base of the weights alpha^(R - i) of a suffix of R tokens, at least 1. 1.01 is
            stable at the published R of up to 96, 1.05 diverges there.

    Raises:
        ValueError: An alpha below 1.
    """

    knows_noise = True

    def __init__(self, *args, alpha: float, **kwargs):
        super().__init__(*args, **kwargs)
        if alpha < 1:
            raise ValueError(f"alpha={alpha} is not allowed: it must be at least 1")
        self.alpha = alpha

    def block_weight(self, batch: dict[str, Tensor]) -> Tensor:
        return deer.refine_weight(batch["masked"], batch["size"], self.alpha)

    def block_losses(
        self, logits: Tensor, batch: dict[str, Tensor], states: TargetStates | None
    ) -> tuple[Tensor, Tensor]:
        loss, weight = deer.refine(
            logits, batch["target"], batch["masked"], batch["size"], self.alpha
        )
        return self.taught(loss, logits, batch, states), weight
