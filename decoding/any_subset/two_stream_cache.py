"""Any-subset networks in decoding: content and questions about positions in one pass."""

from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from decoding.engine.cache import CachedNetwork
from models.masks import Layout, dense, draft_blocks
from models.twostream import is_xlnet
from models.xlnet import CachedXLNet


class Branches(NamedTuple):
    """The last N content tokens are the nodes of a tree behind one last place, not a text.

    depth, path [B, N]: of each node, see `decoding.drafting.tree.Trees`. seen [B, Q]: the path of
    the node that each query is asked behind; 0 at the root.
    """

    depth: Tensor
    path: Tensor
    seen: Tensor


class TwoStreamNetwork(CachedNetwork):
    """An any-subset network whose content is cached.

    Slot i holds the content of place i of the order. It depends on earlier places only, so it
    never changes once they are fixed. The slots behind a row's content are lent to the queries of
    one pass.
    """

    def __init__(self, network: PreTrainedModel, capacity: int, mask_id: int):
        self.own_keys = not is_xlnet(network)  # no query of XLNet has a key
        forward = network if self.own_keys else CachedXLNet(network, mask_id)
        super().__init__(forward, draft_blocks, capacity)
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
        branches: Branches | None = None,
    ) -> Tensor:
        """Logits [B, Q, V] of queries: new content and they go through one forward.

        tokens, order [B, capacity]: token and position of each place in the order; m [B], tokens of
        prompt. The first end [B] places hold tokens now, of which the cache knows the first cached
        [B]. positions, seen [B, Q]: a query about a position sees the first `seen` places.
        """
        Q, first = positions.shape[1], m[:, None] - 1
        width = int((end - cached).max())
        slots = end[:, None] + torch.arange(-width, Q, device=end.device)
        # Rows with less new content are padded on the left, so that their queries stand last.
        padding = slots < cached[:, None]
        content = slots[:, :width].clamp_min(0)
        keys = self._slots[:, : int(end.max()) + Q].expand(len(end), -1)
        place = keys if branches is None else self._places(keys, end, branches)
        number = torch.arange(Q, device=end.device).expand_as(positions)
        q = Layout(
            torch.zeros_like(slots),
            torch.cat([place.gather(1, content).maximum(first), seen], 1),
            torch.cat([torch.full_like(content, -1), number], 1),
        )
        lent = (keys - end[:, None]).clamp_min(-1)
        k = Layout(torch.zeros_like(keys), place.maximum(first), lent)
        mask = dense(draft_blocks, q, k)
        if not self.own_keys:
            mask &= (lent < 0)[:, None, None]
        if branches is not None:
            path = torch.zeros_like(keys).scatter(1, self._nodes(end, branches), branches.path)
            own = torch.cat([path.gather(1, content), branches.seen], 1)
            mask &= (path[:, None] & ~own[:, :, None] == 0)[:, None]
        return self.run(
            torch.cat([tokens.gather(1, content), torch.full_like(positions, self.mask_id)], 1),
            torch.cat([order.gather(1, place.gather(1, content)), positions], 1),
            slots.masked_fill(padding, self.cache.capacity - 1),
            mask,
            keep=Q,
        ).logits

    def _nodes(self, end: Tensor, branches: Branches) -> Tensor:
        """The slots of a tree's nodes [B, N]."""
        N = branches.depth.shape[1]
        return end[:, None] - N + self._slots[:, :N]

    def _places(self, slots: Tensor, end: Tensor, branches: Branches) -> Tensor:
        """The place in the order of what stands at each slot: nodes of one depth share one."""
        nodes = self._nodes(end, branches)
        return slots.scatter(1, nodes, nodes[:, :1] + branches.depth - 1)
