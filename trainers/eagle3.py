"""EAGLE-3 (arXiv 2503.01840): drafters of one layer that read the target's states."""

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field
from torch import Tensor

from data.text.tokenizer import spare_token_id
from models.eagle3 import LlamaForCausalLMEagle3, check_fits, draft_states
from trainers.losses.eagle3 import step_weight
from trainers.state_reader import StateReaderModule


class Eagle3(StateReaderModule):
    """The module of an EAGLE-3 drafter: training-time test of `block_size` steps at each anchor.

    Args:
        network: The drafter (`models.eagle3.from_target`). Its config names the target layers that
            it reads.
        beta: Weight of a step relative to the step before it; published: 0.8.
        layout: `none`: the drafter reads no block of masks.
    """

    layouts = ("none",)

    def __init__(
        self,
        network: LlamaForCausalLMEagle3,
        *args,
        beta: Annotated[float, Field(gt=0, le=1)] = 0.8,
        layout: str = "none",
        **kwargs,
    ):
        super().__init__(network, *args, layout=layout, **kwargs)
        self.beta = beta
        if self.heads:
            raise ValueError(
                "module.markov_rank is not allowed: an EAGLE-3 drafter knows the token before"
            )
        if network.parallel:
            network.config.pard_token = spare_token_id(self.tokenizer)

    def check_fits(self, target) -> None:
        check_fits(self.network.config, target)

    def block_weight(self, batch: dict[str, Tensor]) -> Tensor:
        """Return beta^(i - 1) at drafted token i; 0 where the block's text has no state before."""
        before, document = (batch["start"] - 2).clamp_min(0), batch["document"]
        same = document.gather(1, before) == document.gather(1, before + 1)
        known = (batch["start"] > 1) & same
        return step_weight(batch["masked"] & known[..., None], self.beta)

    def draft_states(self, batch: dict[str, Tensor], states: Sequence[Tensor]) -> Tensor:
        return draft_states(self.network, self.target, batch, states)

    def export_config(self) -> dict:
        entry = super().export_config()
        del entry["attention"]
        return entry
