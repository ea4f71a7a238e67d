"""Adaptation of a causal LM to masked diffusion, on ordinary text (no teacher)."""

from torch import Tensor

from trainers.drafter import DrafterModule, TargetStates
from trainers.losses.diffusion import denoising_weight, token_nll


class MaskedDiffusion(DrafterModule):
    """Training module of block drafters: masked-diffusion bound of blocks after their prefix."""

    def block_weight(self, batch: dict[str, Tensor]) -> Tensor:
        return denoising_weight(batch["masked"], batch["rate"], batch["size"])

    def block_losses(
        self, logits: Tensor, batch: dict[str, Tensor], states: TargetStates | None
    ) -> tuple[Tensor, Tensor]:
        return token_nll(logits, batch["target"]), self.block_weight(batch)
