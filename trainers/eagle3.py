"""EAGLE-3 (arXiv 2503.01840): drafters of one layer that read the target's states."""

from collections.abc import Sequence

from torch import Tensor

from data.text.tokenizer import spare_token_id
from models.eagle3 import LlamaForCausalLMEagle3, draft_states
from trainers.rollout import RolloutModule


class Eagle3(RolloutModule):
    """The module of an EAGLE-3 drafter (`models.eagle3.from_target`); published `beta`: 0.8."""

    def __init__(self, network: LlamaForCausalLMEagle3, *args, **kwargs):
        super().__init__(network, *args, **kwargs)
        if network.parallel:
            network.config.pard_token = spare_token_id(self.tokenizer)

    def draft_states(self, batch: dict[str, Tensor], states: Sequence[Tensor]) -> Tensor:
        return draft_states(self.network, self.target, batch, states)
