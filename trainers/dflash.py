"""DFlash (arXiv 2602.06036): block drafters that read the target's hidden states."""

import math

from torch import Tensor

from data.corruption.draft_blocks import block_width
from decoding.commands.values import unknown
from decoding.engine import vocabulary
from models.dflash import LAYOUTS, DFlashDraftModel, check_fits, draft_states
from trainers.drafter import TargetStates
from trainers.losses.dflash import adaptive_weight, decay_weight
from trainers.losses.diffusion import token_nll
from trainers.taught import TaughtModule


class DFlash(TaughtModule):
    """The module of a DFlash drafter: fully masked blocks after random prefixes.

    Args:
        network: The drafter (`models.dflash_init.from_target`); its config names the layers
            that it reads of the target; its mask token and block size are written there, as engines
            read them.
        gamma: Of the weights of a block's positions (`trainers.losses.dflash.decay_weight`).
        layout: Of draft blocks, one of `models.dflash.LAYOUTS`: 'dflash' as published, or 'dspark',
            whose last committed token drafts the first token, as a causal LM's does.
        dpace: The alpha of D-PACE's weights, which follow from what the drafter knows
            (`adaptive_weight`), in place of gamma's; as published 0.5. None: gamma's.

    Raises:
        ValueError: A gamma that is not positive, an alpha outside of (0, 1], another layout, or a
            trained drafter with another mask token or layout.
    """

    served_layouts = ("dflash",)

    def __init__(
        self,
        network: DFlashDraftModel,
        *args,
        gamma: float = 4.0,
        dpace: float | None = None,
        layout: str = "dflash",
        **kwargs,
    ):
        if layout not in LAYOUTS:
            raise unknown("module.layout", layout, LAYOUTS)
        super().__init__(network, *args, layout=layout, draft_ids=network.draft_ids, **kwargs)
        if gamma <= 0:
            raise ValueError(f"gamma={gamma} is not allowed: it must be positive")
        if dpace is not None and not 0 < dpace <= 1:
            raise ValueError(f"dpace={dpace} is not allowed: it must be in (0, 1], or null")
        trained = network.config.dflash_config["mask_token_id"]
        if trained not in (None, self.mask_id):
            raise ValueError(
                f"the drafter to start from reads token {trained} as its mask, and the tokenizer "
                f"has {self.mask_id}: give that token as tokenizer.mask_token"
            )
        if self.is_trained() and network.samples_from_anchor != LAYOUTS[layout]:
            raise ValueError(
                f"layout={layout} is not allowed: the drafter to start from has "
                f"layout={next(name for name in LAYOUTS if name != layout)}"
            )
        if LAYOUTS[layout]:
            network.config.dflash_config["sample_from_anchor"] = True
        self.gamma, self.dpace = gamma, dpace
        self.target_layers = network.target_layer_ids
        network.config.dflash_config["mask_token_id"] = self.mask_id
        network.config.block_size = block_width(layout, self.block_size)  # what the drafter reads

    def is_trained(self) -> bool:
        return bool(self.network.name_or_path)  # it was loaded: a new one comes from no folder

    def attach_target(self, target) -> None:
        if target is not None:
            check_fits(self.network.config, target)
        super().attach_target(target)

    def block_weight(self, batch: dict[str, Tensor]) -> Tensor:
        # D-PACE's weights are known after the forward alone, so there they are part of the loss.
        gamma = self.gamma if self.dpace is None else math.inf
        return decay_weight(batch["masked"], gamma)

    def draft_logits(self, batch: dict[str, Tensor], states: TargetStates | None) -> Tensor:
        assert states is not None
        hidden = draft_states(self.network, self.target, batch, states.hidden_states)
        return self.network.logits(hidden, self.target)

    def block_losses(
        self, logits: Tensor, batch: dict[str, Tensor], states: TargetStates | None
    ) -> tuple[Tensor, Tensor]:
        nll = token_nll(logits, batch["target"])
        loss = self.taught(nll, logits, batch, states)
        if self.dpace is not None:
            loss = loss * adaptive_weight(nll, batch["masked"], self.dpace)
        return loss, self.block_weight(batch)

    def export_config(self) -> dict:
        entry = super().export_config()
        entry["attention"] = "causal" if self.network.causal else "prefix_causal"
        entry.pop(vocabulary.KEY, None)  # the weights hold it (`d2t`)
        return entry

    def export_files(self) -> dict[str, str | bytes]:
        files = super().export_files()
        files.pop(vocabulary.FILE, None)
        return files
