"""`SoftTargetModule`, the module of drafters that may learn the target's distributions."""

from typing import Literal

from torch import Tensor, cat, finfo, float32, full_like, lerp, promote_types

from data.arguments import Share
from trainers.base import DISTRIBUTIONS
from trainers.drafter import DrafterModule
from trainers.losses.diffusion import soft_nll, stored_nll, token_nll, total_variation
from trainers.target_states import TargetStates

TEACHER_LOSSES = {"kl": soft_nll, "total_variation": total_variation}  # soft_nll: KL's gradient


class SoftTargetModule(DrafterModule):
    """The module of a drafter whose loss may have a share against the target's distributions.

    Args:
        soft: Share of the loss, in [0, 1], that is taken against the target's distribution at each
            position instead of the one token that the target drew.
        teacher_loss: The loss of that share, 'kl' or 'total_variation'.
        teacher: The source of the distributions: 'target', a forward of it in every step, or
            'answers', the most probable tokens stored with the answers (`collector.top_k`),
            renormalised; these allow the loss 'kl' only.
    """

    def __init__(
        self,
        *args,
        soft: Share = 0.0,
        teacher_loss: Literal[*TEACHER_LOSSES] = "kl",
        teacher: Literal["target", "answers"] = "target",
        **kwargs,
    ):
        super().__init__(*args, **kwargs)
        if teacher_loss != "kl" and not soft:
            raise ValueError(
                f"teacher_loss={teacher_loss} with soft=0 would do nothing: give module.soft its "
                "share of the loss, in (0, 1]"
            )
        if teacher_loss != "kl" and teacher == "answers":
            raise ValueError(
                f"teacher_loss={teacher_loss} needs whole distributions: give module.teacher=target"
            )
        self.soft, self.teacher_loss, self.teacher = soft, teacher_loss, teacher

    @property
    def needs_target(self) -> frozenset[str]:
        """The outputs of the base module, and distributions if `soft` gives them a share."""
        asks = self.soft and self.teacher == "target"
        return super().needs_target | ({DISTRIBUTIONS} if asks else set())

    def block_losses(
        self, logits: Tensor, batch: dict[str, Tensor], states: TargetStates | None
    ) -> tuple[Tensor, Tensor]:
        return self.token_losses(logits, batch, states), self.block_weight(batch)

    def token_losses(
        self, logits: Tensor, batch: dict[str, Tensor], states: TargetStates | None
    ) -> Tensor:
        """Mix -log q of the tokens [B, A, K] and the loss against the target's p by `soft`.

        `logits` [B, A, K, V] are the drafter's; `states` the outputs that `needs_target` names.
        """
        if not self.soft:
            return token_nll(logits, batch["target"])
        if self.teacher == "answers":
            return stored_nll(logits, *self._stored(batch))
        assert states is not None
        against = TEACHER_LOSSES[self.teacher_loss](logits, states.logits)
        return lerp(token_nll(logits, batch["target"]), against, self.soft)

    def _stored(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the tokens stored with the answers, the answer's own last, and their shares."""
        if "teacher_ids" not in batch:
            raise ValueError(
                "module.teacher=answers, but the answers were collected without distributions: "
                "collect them with collector.top_k=16, or give module.teacher=target"
            )
        own, p = batch["target"][..., None], batch["teacher_probs"]
        p = p.to(promote_types(p.dtype, float32))
        p = p / p.sum(-1, keepdim=True).clamp_min(finfo(p.dtype).tiny)  # 0 if none is drafted
        shares = cat([self.soft * p, full_like(p[..., :1], 1 - self.soft)], -1)
        return cat([batch["teacher_ids"], own], -1), shares
