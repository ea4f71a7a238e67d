"""Recurrent drafters (ReDrafter, arXiv 2403.09919), which go on from the target's states."""

from collections.abc import Sequence

from torch import Tensor

from decoding.drafting.block_sampler import BlockSampler
from models.redrafter import draft_states
from trainers.rollout import RolloutModule


class Redrafter(RolloutModule):
    """The module of a recurrent drafter (`models.redrafter.from_target`)."""

    def draft_states(self, batch: dict[str, Tensor], states: Sequence[Tensor]) -> Tensor:
        return draft_states(self.network, self.target, batch, states)

    def sampler(self) -> BlockSampler | None:
        """Return what drafts chains without n-grams, however many prompts a validation has."""
        sampler = super().sampler()
        return None if sampler is None else sampler.always_drafting()
