"""`TaughtModule`, the module of drafters that may learn the target's distributions."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from data.corpora.answers import TEMPERATURE
from data.corruption.draft_blocks import SEED
from decoding.commands.cli import unknown
from models.noise import posterior_gumbel
from trainers.base import DISTRIBUTIONS
from trainers.drafter import DrafterModule, TargetStates
from trainers.losses import acceptance
from trainers.losses.diffusion import soft_nll, stored_nll

TEACHERS = ("target", "answers")  # where the target's distributions come from

# Of (logits, the target's logits); 'length' also takes the tokens. soft_nll has KL's gradient.
TEACHER_LOSSES = {
    "kl": soft_nll,
    "total_variation": acceptance.total_variation,
    "log_acceptance": acceptance.log_acceptance,
    "coupled_miss": acceptance.coupled_miss,
    "length": acceptance.length,
}


class TaughtModule(DrafterModule):
    """The module of a drafter whose loss may have a share against the target's distributions.

    Args:
        soft: Share of the loss, in [0, 1], that is taken against the target's distribution at each
            position instead of the one token that the target drew.
        teacher_loss: The loss of that share, a key of TEACHER_LOSSES
            (`trainers/losses/acceptance.py`).
        teacher: Where the target's distributions come from: 'target', a forward of it in every
            step, or 'answers', the most probable tokens that were stored with the answers
            (`collector.top_k`), renormalised; these know the loss 'kl' only.

    Raises:
        ValueError: A value outside of its range, or a teacher_loss without a share.
    """

    def __init__(
        self,
        *args,
        soft: float = 0.0,
        teacher_loss: str = "kl",
        teacher: str = "target",
        **kwargs,
    ):
        super().__init__(*args, **kwargs)
        if teacher not in TEACHERS:
            raise unknown("teacher", teacher, TEACHERS)
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
        if self.noise_input is not None and soft < 1:
            raise ValueError(
                f"module.soft={soft} is not allowed with module.noise_layers: give module.soft=1, "
                "as a token tells of the noise that chose it, which decoding adds to the logits"
            )
        self.soft, self.teacher_loss, self.teacher = soft, teacher_loss, teacher

    @property
    def needs_target(self) -> frozenset[str]:
        """What training reads of the target: distributions too, if `soft` gives them a share."""
        asks = self.soft and self.teacher == "target"
        return super().needs_target | ({DISTRIBUTIONS} if asks else set())

    def taught(
        self,
        loss: Tensor,
        logits: Tensor,
        batch: dict[str, Tensor],
        states: TargetStates | None,
    ) -> Tensor:
        """The loss of the target's tokens, of which `soft` gives a share to its distributions.

        Args:
            loss: [B, A, K], of the tokens.
            logits: [B, A, K, V], the drafter's.
            batch: Packed draft blocks, their targets as indices of the drafter's logits.
            states: The outputs of the target that `needs_target` names.

        Returns:
            [B, A, K].

        Raises:
            ValueError: Stored distributions are asked for, and there are none.
        """
        if not self.soft:
            return loss
        if self.teacher == "answers":
            against = stored_nll(logits, *self._stored(batch))
        else:
            assert states is not None
            tokens = [batch["target"]] if self.teacher_loss == "length" else []
            against = TEACHER_LOSSES[self.teacher_loss](logits, states.logits, *tokens)
        return torch.lerp(loss, against, self.soft)

    @torch.no_grad()
    def noise_of(self, batch: dict[str, Tensor], states: TargetStates | None) -> Tensor:
        if TEMPERATURE not in batch:
            raise ValueError(
                "module.noise_layers needs the temperature that each text was drawn at: give "
                "data.train.source the folder of a collection of answers"
            )
        temperature = batch[TEMPERATURE].unsqueeze(-1)
        log_p = self._teacher_log_probs(batch, states)
        p = (log_p / torch.where(temperature > 0, temperature, 1)).softmax(-1)
        # Of each row by its own seed, so that noise does not depend on how a batch is split.
        seeds = batch[SEED].tolist()
        generators = [torch.Generator(p.device).manual_seed(seed) for seed in seeds]
        token = batch["target"].masked_fill(~batch["masked"], -1)
        noise = torch.stack([posterior_gumbel(*row) for row in zip(p, token, generators)])
        ids = torch.arange(p.shape[-1]) if self.draft_ids is None else self.draft_ids
        never = sum(ids == token for token in (self.mask_id, self.sep_id)).bool()
        return (noise * temperature).masked_fill(never.to(p.device), -torch.inf)

    def _teacher_log_probs(self, batch: dict[str, Tensor], states: TargetStates | None) -> Tensor:
        """The target's log-probabilities [B, A, K, V], up to a constant; stored ones leave a rest.

        What the stored probabilities leave is spread evenly over all other tokens.
        """
        V = self.network.config.vocab_size if self.draft_ids is None else len(self.draft_ids)
        if self.teacher == "target":
            assert states is not None
            found = states.logits[..., :V].float()
            return pad(found, (0, V - found.shape[-1]), value=-torch.inf)
        ids, probs = self._stored(batch)
        rest = (1 - probs.sum(-1, keepdim=True)).clamp_min(0) / V
        return rest.expand(*ids.shape[:-1], V).scatter_add(-1, ids, probs).log()

    def _stored(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The stored distributions of a batch: tokens and probabilities, [B, A, K, k] each."""
        if "teacher_ids" not in batch:
            raise ValueError(
                "module.teacher=answers, but the answers were collected without distributions: "
                "collect them with collector.top_k=16, or give module.teacher=target"
            )
        return batch["teacher_ids"], batch["teacher_probs"].float()
