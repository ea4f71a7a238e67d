"""The head of drafters that read their target: their own for some tokens, or the target's."""

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from models.hidden_states import check_layers


class DraftHead:
    """Methods of a network whose `lm_head` covers the tokens that `d2t` names.

    Draft token d is the target's d + d2t[d], as engines read it. The network has no embeddings: the
    target's are used. Without `lm_head` (None) the head is the target's too.
    """

    config: PreTrainedConfig
    target_layer_ids: tuple[int, ...]  # whose outputs it reads (`models.hidden_states`)
    lm_head: nn.Linear | None
    d2t: Tensor

    def get_input_embeddings(self) -> None:
        """Return None: the target's embeddings are used."""

    def get_output_embeddings(self) -> nn.Linear | None:
        """Return the drafter's own head, if it has one."""
        return self.lm_head

    @property
    def draft_ids(self) -> Tensor | None:
        """Return the target tokens [Vd] that the drafter's own head covers; None without one."""
        if self.lm_head is None:
            return None
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    @torch.no_grad()
    def copy_head(self, source: PreTrainedModel, draft_ids: Tensor) -> None:
        """Begin the own head with the target's rows of these tokens [Vd]."""
        assert self.lm_head is not None
        ids = draft_ids.sort().values
        self.d2t.copy_(ids - torch.arange(len(ids)))
        self.lm_head.weight.copy_(source.get_output_embeddings().weight[ids])

    def check_fits(self, target: PreTrainedModel) -> None:
        """Raise ValueError unless the drafter is for a target of this size and depth."""
        theirs, config = target.config.get_text_config(), self.config
        sizes = {
            "num_target_layers": theirs.num_hidden_layers,
            "hidden_size": theirs.hidden_size,
            "vocab_size": theirs.vocab_size,
        }
        for name, needed in sizes.items():
            if (ours := getattr(config, name, needed)) != needed:
                raise ValueError(
                    f"the drafter is for a target with {name}={ours}, and this one has {needed}"
                )
        check_layers(target, self.target_layer_ids)

    def check_ids(self) -> None:
        """Raise ValueError if the own head covers tokens that the target lacks."""
        ids = self.draft_ids
        if ids is not None and (int(ids.min()) < 0 or int(ids.max()) >= self.config.vocab_size):
            raise ValueError(
                f"its d2t points to tokens {int(ids.min())} to {int(ids.max())}, and the target's "
                f"are 0 to {self.config.vocab_size - 1}"
            )

    def logits(self, hidden: Tensor, target: PreTrainedModel) -> Tensor:
        """Return logits [..., V] of states [..., H], by the drafter's own head or the target's."""
        head = self.lm_head or target.get_output_embeddings()
        return head(hidden.to(head.weight.dtype))
