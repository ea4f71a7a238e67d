"""The head of drafters that read their target: their own for some tokens, or the target's."""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


class DraftHead:
    """Methods of a network whose `lm_head` covers the tokens that `d2t` names.

    Draft token d is the target's d + d2t[d], as engines read it. The network has no embeddings: the
    target's are used. Without `lm_head` (None) the head is the target's too.
    """

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

    def logits(self, hidden: Tensor, target: PreTrainedModel) -> Tensor:
        """Return logits [..., V] of states [..., H], by the drafter's own head or the target's."""
        head = self.lm_head or target.get_output_embeddings()
        return head(hidden.to(head.weight.dtype))
