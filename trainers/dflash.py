"""DFlash (arXiv 2602.06036): block drafters that read the target's hidden states."""

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field
from torch import Tensor, nn

from models.dflash import DFlashDraftModel, draft_states
from trainers.draft_vocabulary import PREVIOUS
from trainers.losses.dflash import decay_weight
from trainers.state_reader import StateReaderModule
from trainers.target_states import TargetStates


class DFlash(StateReaderModule):
    """The module of a DFlash drafter: fully masked blocks after random prefixes.

    Args:
        network: The drafter (`models.dflash_init.from_target`). Its config names the target layers
            that it reads; the mask token and block size are written there for engines.
        gamma: Decay of a block's weights (`trainers.losses.dflash.decay_weight`), positive.
        layout: Layout of draft blocks (`data.text.layouts`): 'dflash' as published, or 'dspark',
            whose last committed token drafts the first token, as a causal LM's does.
    """

    layouts = ("dflash", "dspark")

    def __init__(
        self,
        network: DFlashDraftModel,
        *args,
        gamma: Annotated[float, Field(gt=0, le=4096)] = 4.0,
        layout: str = "dflash",
        **kwargs,
    ):
        if kwargs.get("markov_rank") is not None:
            raise ValueError(
                "module.markov_rank is not allowed: the head of a DFlash drafter is a part of its "
                "network, network.markov_rank"
            )
        super().__init__(network, *args, layout=layout, **kwargs)
        trained = network.config.dflash_config["mask_token_id"]
        if trained not in (None, self.mask_id):
            raise ValueError(
                f"the drafter to start from reads token {trained} as its mask, and the tokenizer "
                f"has {self.mask_id}: give that token as tokenizer.mask_token"
            )
        if self.is_trained() and network.samples_from_anchor != self.layout.anchored:
            raise ValueError(
                f"layout={layout} is not allowed: the drafter to start from has "
                f"layout={next(name for name in self.layouts if name != layout)}"
            )
        if network.tail and not self.layout.anchored:
            raise ValueError(
                f"layout={layout} is not allowed with network.tail={network.tail}: a tail reads "
                "the token before the one it drafts, so give layout=dspark"
            )
        if self.layout.anchored:
            network.config.dflash_config["sample_from_anchor"] = True
        if network.markov_head is not None:
            network.config.sample_from_anchor = self.layout.anchored  # where DSpark's is
        self.gamma = gamma
        network.config.dflash_config["mask_token_id"] = self.mask_id
        network.config.block_size = self.layout.width(self.block_size)  # what it reads

    def auxiliary(self) -> list[nn.Parameter]:
        head = self.network.markov_head
        return [] if head is None else [*head.parameters()]

    def is_trained(self) -> bool:
        return bool(self.network.name_or_path)  # it was loaded: a new one comes from no folder

    def block_weight(self, batch: dict[str, Tensor]) -> Tensor:
        return decay_weight(batch["masked"], self.gamma)

    def draft_states(self, batch: dict[str, Tensor], states: Sequence[Tensor]) -> Tensor:
        return draft_states(self.network, self.target, batch, states)

    def draft_logits(self, batch: dict[str, Tensor], states: TargetStates | None) -> Tensor:
        logits, head = super().draft_logits(batch, states), self.network.markov_head
        return logits if head is None else logits + head(batch[PREVIOUS])

    def export_config(self) -> dict:
        attention = "causal" if self.network.causal else "prefix_causal"
        return super().export_config() | {"attention": attention}
