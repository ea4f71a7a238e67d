"""`RolloutModule`, the module of drafters that draft token after token on their own output."""

from typing import Annotated

from pydantic import Field
from torch import Tensor

from trainers.losses.rollout import step_weight
from trainers.state_reader import StateReaderModule


class RolloutModule(StateReaderModule):
    """The module of a drafter that takes `block_size` steps on its own output at each anchor.

    The steps read the text's own tokens (training-time test), which is what makes drafts after the
    first ones good. A method overrides `draft_states`.

    Args:
        network: The drafter. Its config names the target layers that it reads.
        beta: Weight of a step relative to the step before it.
        layout: `none`: the drafter reads no block of masks.
    """

    layouts = ("none",)

    def __init__(
        self,
        network,
        *args,
        beta: Annotated[float, Field(gt=0, le=1)] = 0.8,
        layout: str = "none",
        **kwargs,
    ):
        super().__init__(network, *args, layout=layout, **kwargs)
        self.beta = beta
        if self.heads:
            raise ValueError(
                "module.markov_rank is not allowed: such a drafter knows the token before"
            )

    def block_weight(self, batch: dict[str, Tensor]) -> Tensor:
        """Return beta^(i - 1) at drafted token i; 0 where the block's text has no state before."""
        before, document = (batch["start"] - 2).clamp_min(0), batch["document"]
        same = document.gather(1, before) == document.gather(1, before + 1)
        known = (batch["start"] > 1) & same
        return step_weight(batch["masked"] & known[..., None], self.beta)

    def export_config(self) -> dict:
        entry = super().export_config()
        del entry["attention"]
        return entry
