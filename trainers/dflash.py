"""DFlash (arXiv 2602.06036): block drafters that read the target's hidden states."""

from typing import Annotated

from pydantic import Field
from torch import Tensor

from decoding.engine import vocabulary
from models.dflash import DFlashDraftModel, check_fits, draft_states
from trainers.losses.dflash import decay_weight
from trainers.losses.diffusion import token_nll
from trainers.soft_targets import SoftTargetModule
from trainers.target_states import TargetStates


class DFlash(SoftTargetModule):
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
        super().__init__(network, *args, layout=layout, draft_ids=network.draft_ids, **kwargs)
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
        if network.tail and self.heads:
            raise ValueError(
                f"module.markov_rank is not allowed with network.tail={network.tail}, which knows "
                "the token before: give module.markov_rank=null"
            )
        if network.tail and not self.layout.anchored:
            raise ValueError(
                f"layout={layout} is not allowed with network.tail={network.tail}: a tail reads "
                "the token before the one it drafts, so give layout=dspark"
            )
        if self.layout.anchored:
            network.config.dflash_config["sample_from_anchor"] = True
        self.gamma = gamma
        self.target_layers = network.target_layer_ids
        network.config.dflash_config["mask_token_id"] = self.mask_id
        network.config.block_size = self.layout.width(self.block_size)  # what it reads

    def is_trained(self) -> bool:
        return bool(self.network.name_or_path)  # it was loaded: a new one comes from no folder

    def attach_target(self, target) -> None:
        if target is not None:
            check_fits(self.network.config, target)
        super().attach_target(target)

    def block_weight(self, batch: dict[str, Tensor]) -> Tensor:
        return decay_weight(batch["masked"], self.gamma)

    def draft_logits(self, batch: dict[str, Tensor], states: TargetStates | None) -> Tensor:
        assert states is not None
        hidden = draft_states(self.network, self.target, batch, states.hidden_states)
        return self.network.logits(hidden, self.target)

    def block_losses(
        self, logits: Tensor, batch: dict[str, Tensor], states: TargetStates | None
    ) -> tuple[Tensor, Tensor]:
        nll = token_nll(logits, batch["target"])
        return self.with_soft_targets(nll, logits, batch, states), self.block_weight(batch)

    def export_config(self) -> dict:
        entry = super().export_config()
        entry["attention"] = "causal" if self.network.causal else "prefix_causal"
        entry.pop(vocabulary.KEY, None)  # the weights hold it (`d2t`)
        return entry

    def export_files(self) -> dict[str, str | bytes]:
        files = super().export_files()
        files.pop(vocabulary.FILE, None)
        return files
