"""Recurrent drafters (ReDrafter, arXiv 2403.09919), which go on from the target's states."""

from collections.abc import Sequence

from torch import Tensor

from decoding.drafting.block_sampler import BlockSampler
from decoding.samplers.redrafter import RedrafterSampler
from models.redrafter import draft_states
from trainers.rollout import RolloutModule


class Redrafter(RolloutModule):
    """The module of a recurrent drafter (`models.redrafter.from_target`)."""

    def draft_states(self, batch: dict[str, Tensor], states: Sequence[Tensor]) -> Tensor:
        return draft_states(self.network, self.target, batch, states)

    def sampler(self) -> BlockSampler | None:
        sampler = super().sampler()
        if isinstance(sampler, RedrafterSampler):
            sampler.kept_tokens = 0  # or each validation would know the answers of the one before
        return sampler
