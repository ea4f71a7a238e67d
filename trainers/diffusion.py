"""Masked diffusion of draft blocks, on ordinary text or on a teacher's answers."""

from torch import Tensor

from trainers.drafter import DrafterModule
from trainers.losses.diffusion import denoising_weight, token_nll
from trainers.target_states import TargetStates


class MaskedDiffusion(DrafterModule):
    """The module of block drafters: masked-diffusion bound of blocks after their prefix.

    sum_i 1[x_i^t = M] / (t L) * -log p(x_i^0 | prefix, x^t): arXiv 2502.09992, Eq. 3, and on a
    teacher's answers stage I of arXiv 2512.15176, Eq. 1-2.
    """

    def block_weight(self, batch: dict[str, Tensor]) -> Tensor:
        return denoising_weight(batch["masked"], batch["rate"], batch["size"])

    def block_losses(
        self, logits: Tensor, batch: dict[str, Tensor], states: TargetStates | None
    ) -> tuple[Tensor, Tensor]:
        return token_nll(logits, batch["target"]), self.block_weight(batch)
