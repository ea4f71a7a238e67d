"""A toy drafter that reads a layer of its target and knows the commonest tokens only."""

import torch
from trainers.losses.toy import toy

from trainers.drafter import DrafterModule


class Toy(DrafterModule):
    """Drafts from the target's hidden state before the last committed token."""

    target_layers = (1,)

    def __init__(self, *args, **kwargs):
        network = kwargs["network"]
        super().__init__(*args, draft_ids=torch.arange(network.config.draft_size) * 2, **kwargs)

    def block_weight(self, batch):
        return batch["masked"].float()

    def draft_logits(self, batch, states):
        (hidden,) = states.hidden_states
        row = torch.arange(len(hidden), device=hidden.device)[:, None]
        # The block begins at `start`; the last committed token is the one before it.
        return self.network(hidden[row, (batch["start"] - 2).clamp_min(0)])

    def block_losses(self, logits, batch, states):
        return toy(logits, batch["target"], batch["masked"])
