"""DEER's two stages of diffusion-to-AR alignment (arXiv 2512.15176, section 3.1)."""

import torch
from torch import Tensor

from decoding.commands.cli import unknown
from trainers.base import DISTRIBUTIONS
from trainers.drafter import DrafterModule, TargetStates
from trainers.losses import acceptance, deer
from trainers.losses.diffusion import denoising_weight, soft_nll, stored_nll

TEACHERS = ("target", "answers")  # where the target's distributions come from

# Of (logits, the target's logits); 'length' also takes the tokens. soft_nll has KL's gradient.
TEACHER_LOSSES = {
    "kl": soft_nll,
    "total_variation": acceptance.total_variation,
    "log_acceptance": acceptance.log_acceptance,
    "coupled_miss": acceptance.coupled_miss,
    "length": acceptance.length,
}


class Distillation(DrafterModule):
    """The module of stage I: masked continuations of teacher answers (Eq. 1-2)."""

    def block_weight(self, batch: dict[str, Tensor]) -> Tensor:
        return denoising_weight(batch["masked"], batch["rate"], batch["size"])

    def block_losses(
        self, logits: Tensor, batch: dict[str, Tensor], states: TargetStates | None
    ) -> tuple[Tensor, Tensor]:
        return deer.distill(logits, batch["target"], batch["masked"], batch["rate"], batch["size"])


class Refinement(DrafterModule):
    """The module of stage II: fully masked suffixes, weighted towards the prefix (Eq. 3-4).

    Args:
        alpha: Base of the weights alpha^(R - i) of a suffix of R tokens, at least 1. 1.01 is
            stable at the published R of up to 96, 1.05 diverges there.
        soft: Share of the loss, in [0, 1], that is taken against the target's distribution at each
            position instead of the one token that the target drew (0: the paper's Eq. 4).
        teacher_loss: The loss of that share, a key of TEACHER_LOSSES
            (`trainers/losses/acceptance.py`). Stage I cannot use it: there a token's context holds
            later ones, too.
        teacher: Where the target's distributions come from: 'target', a forward of it in every
            step, or 'answers', the most probable tokens that were stored with the answers
            (`collector.top_k`), renormalised; these know the loss 'kl' only.

    Raises:
        ValueError: A value outside of its range, or a teacher_loss without a share.
    """

    def __init__(
        self,
        *args,
        alpha: float,
        soft: float = 0.0,
        teacher_loss: str = "kl",
        teacher: str = "target",
        **kwargs,
    ):
        super().__init__(*args, **kwargs)
        if teacher not in TEACHERS:
            raise unknown("teacher", teacher, TEACHERS)
        if alpha < 1:
            raise ValueError(f"alpha={alpha} is not allowed: it must be at least 1")
        if not 0 <= soft <= 1:
            raise ValueError(f"soft={soft} is not allowed: it must be in [0, 1]")
        if teacher_loss not in TEACHER_LOSSES:
            raise unknown("teacher_loss", teacher_loss, TEACHER_LOSSES)
        if teacher_loss != "kl" and not soft:
            raise ValueError(
                f"teacher_loss={teacher_loss} with soft=0 would do nothing: give module.soft its "
                "share of the loss, in (0, 1]"
            )
        if teacher_loss != "kl" and teacher == "answers":
            raise ValueError(
                f"teacher_loss={teacher_loss} needs whole distributions: give module.teacher=target"
            )
        self.alpha, self.soft, self.teacher_loss, self.teacher = alpha, soft, teacher_loss, teacher

    @property
    def needs_target(self) -> frozenset[str]:
        """What training reads of the target: distributions too, if `soft` gives them a share."""
        asks = self.soft and self.teacher == "target"
        return super().needs_target | ({DISTRIBUTIONS} if asks else set())

    def block_weight(self, batch: dict[str, Tensor]) -> Tensor:
        return deer.refine_weight(batch["masked"], batch["size"], self.alpha)

    def block_losses(
        self, logits: Tensor, batch: dict[str, Tensor], states: TargetStates | None
    ) -> tuple[Tensor, Tensor]:
        loss, weight = deer.refine(
            logits, batch["target"], batch["masked"], batch["size"], self.alpha
        )
        if self.soft and self.teacher == "answers":
            if "teacher_ids" not in batch:
                raise ValueError(
                    "module.teacher=answers, but the answers were collected without distributions: "
                    "collect them with collector.top_k=16, or give module.teacher=target"
                )
            taught = stored_nll(logits, batch["teacher_ids"], batch["teacher_probs"])
            loss = torch.lerp(loss, taught, self.soft)
        elif self.soft:
            assert states is not None
            tokens = [batch["target"]] if self.teacher_loss == "length" else []
            against = TEACHER_LOSSES[self.teacher_loss]
            taught = against(logits, states.logits, *tokens)
            loss = torch.lerp(loss, taught, self.soft)
        return loss, weight
