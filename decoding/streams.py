"""Any-subset networks in decoding: content goes in, questions about positions come back answered.

Both classes answer `ask` for a batch of ragged rows. tokens, order [B, capacity]: token and
position of each place in the order; m [B], tokens of prompt. The first end [B] places hold tokens
now, of which the network knows the first cached [B]. positions, seen [B, Q]: a query about a
position sees the first `seen` places. Returns logits [B, Q, V].
"""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from decoding.cache import CachedNetwork, CountedNetwork
from models.masks import Layout, dense, draft_blocks
from models.twostream import xlnet_logits


class TwoStreamNetwork(CachedNetwork):
    """A two-stream causal LM whose content is cached.

    Slot i holds the content of place i of the order. It depends on earlier places only, so it
    never changes once they are fixed. The slots behind a row's content are lent to the queries of
    one pass.
    """

    def __init__(self, network: PreTrainedModel, capacity: int, mask_id: int):
        super().__init__(network, draft_blocks, capacity)
        self.mask_id = mask_id

    def ask(
        self,
        tokens: Tensor,
        order: Tensor,
        m: Tensor,
        cached: Tensor,
        end: Tensor,
        positions: Tensor,
        seen: Tensor,
    ) -> Tensor:
        """See the module. New content and queries go through one forward."""
        Q, first = positions.shape[1], m[:, None] - 1
        width = int((end - cached).max())
        slots = end[:, None] + torch.arange(-width, Q, device=end.device)
        # Rows with less new content are padded on the left, so that their queries stand last.
        padding = slots < cached[:, None]
        places = slots[:, :width].clamp_min(0)
        number = torch.arange(Q, device=end.device).expand_as(positions)
        q = Layout(
            torch.zeros_like(slots),
            torch.cat([places.maximum(first), seen], 1),
            torch.cat([torch.full_like(places, -1), number], 1),
        )
        keys = self._slots[:, : int(end.max()) + Q].expand(len(end), -1)
        lent = (keys - end[:, None]).clamp_min(-1)
        k = Layout(torch.zeros_like(keys), keys.maximum(first), lent)
        return self.run(
            torch.cat([tokens.gather(1, places), torch.full_like(positions, self.mask_id)], 1),
            torch.cat([order.gather(1, places), positions], 1),
            slots.masked_fill(padding, self.cache.capacity - 1),
            dense(draft_blocks, q, k),
            keep=Q,
        )


class XLNetNetwork(CountedNetwork):
    """XLNet, without a cache: each call runs the whole row.

    A position's query and content share one row of XLNet's mask, so a call may ask about each
    position once only.
    """

    def __init__(self, network: PreTrainedModel):
        super().__init__(network)
        self.cache = self

    def select(self, rows: Tensor) -> None:
        """Nothing is kept between calls."""

    def ask(
        self,
        tokens: Tensor,
        order: Tensor,
        m: Tensor,
        cached: Tensor,
        end: Tensor,
        positions: Tensor,
        seen: Tensor,
    ) -> Tensor:
        """See the module."""
        place = torch.arange(order.shape[1], device=order.device).expand_as(order)
        there = place < end[:, None]
        index = place.maximum(m[:, None] - 1)
        # By position: what stands there, where it is in the order, and how far it sees.
        ids = torch.zeros_like(tokens).scatter(1, order, tokens * there)
        at = torch.zeros_like(index).scatter(1, order, index.where(there, order.shape[1]))
        sees = torch.zeros_like(index).scatter(1, order, (index + 1) * there)
        sees = sees.scatter(1, positions, seen)
        visible = at[:, None, :] < sees[:, :, None]
        asked = torch.ones_like(seen).bool()
        with self.counted():
            return xlnet_logits(self.network, ids, visible, positions, asked)
