"""Cached any-subset networks: new content and queries about positions in one forward."""

from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from decoding.engine.cache import CachedNetwork
from models.masks import Layout, draft_blocks
from models.twostream import is_xlnet
from models.xlnet import CachedXLNet


class Branches(NamedTuple):
    """A draft tree, whose nodes are the last N content tokens."""

    depth: Tensor  # of each node, [B, N]; 1 for children of the root
    path: Tensor  # the nodes on each node's path as bits, [B, N] (`decoding.drafting.tree.Trees`)
    seen: Tensor  # the path of the node that each query is conditioned on, [B, Q]; 0 at the root


def two_stream(network: PreTrainedModel, mask_id: int) -> PreTrainedModel | CachedXLNet:
    """Wrap an any-subset model as `TwoStreamNetwork` runs it."""
    return CachedXLNet(network, mask_id) if is_xlnet(network) else network


class TwoStreamNetwork(CachedNetwork):
    """An any-subset network, wrapped by `two_stream`, with a cache of its content stream.

    Slot i holds the content of index i of the order, which depends on earlier indices only. The
    slots after a row's content hold the queries of one pass, whose token is `mask_id`.
    """

    def __init__(self, network: PreTrainedModel | CachedXLNet, capacity: int, mask_id: int):
        super().__init__(network, draft_blocks, capacity)
        self.own_keys = not isinstance(network, CachedXLNet)  # no query of XLNet has a key
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
        """Run the new content and queries in one forward; return the queries' logits [B, Q, V].

        Args:
            tokens, order: Token and text position of each index of the order, [B, capacity].
            m: Tokens of each prompt, [B].
            cached, end: Indices of each order that the cache holds, and that are decoded, [B].
            positions: The text position that each query is about, [B, Q].
            seen: Indices of the order that each query is conditioned on, [B, Q].
            branches: The tree of the last N tokens; None where they are a chain.
        """
        Q, first = positions.shape[1], m[:, None] - 1
        width = int((end - cached).max())
        slots = end[:, None] + torch.arange(-width, Q, device=end.device)
        # Rows with less new content are padded on the left, so that the queries come last.
        padding = slots < cached[:, None]
        content = slots[:, :width].clamp_min(0)
        keys = self._slots[:, : int(end.max()) + Q].expand(len(end), -1)
        index = keys if branches is None else self._indices(keys, end, branches)
        number = torch.arange(Q, device=end.device).expand_as(positions)
        places = torch.cat([order.gather(1, index.gather(1, content)), positions], 1)
        q = Layout(
            torch.zeros_like(slots),
            torch.cat([index.gather(1, content).maximum(first), seen], 1),
            torch.cat([torch.full_like(content, -1), number], 1),
        )
        query = (keys - end[:, None]).clamp_min(-1)
        k = Layout(torch.zeros_like(keys), index.maximum(first), query)
        if self._windows is not None:  # which are by position in the text, not in the order
            asked = positions.gather(1, query.clamp(0, Q - 1))
            known = order.gather(1, index.clamp_max(order.shape[1] - 1))
            q = q._replace(position=places)
            k = k._replace(position=torch.where(query < 0, known, asked))
        allowed = None if self.own_keys else (query < 0)[:, None, None]
        if branches is not None:
            path = torch.zeros_like(keys).scatter(1, self._nodes(end, branches), branches.path)
            own = torch.cat([path.gather(1, content), branches.seen], 1)
            within = (path[:, None] & ~own[:, :, None] == 0)[:, None]
            allowed = within if allowed is None else allowed & within
        return self.run(
            torch.cat([tokens.gather(1, content), torch.full_like(positions, self.mask_id)], 1),
            places,
            slots.masked_fill(padding, self.cache.capacity - 1),
            self.masks(q, k, order.shape[1], allowed),
            keep=Q,
        ).logits

    def _nodes(self, end: Tensor, branches: Branches) -> Tensor:
        """Return the slots of a tree's nodes, [B, N]."""
        N = branches.depth.shape[1]
        return end[:, None] - N + self._slots[:, :N]

    def _indices(self, slots: Tensor, end: Tensor, branches: Branches) -> Tensor:
        """Return the order index of each slot's token; nodes of one depth share an index."""
        nodes = self._nodes(end, branches)
        return slots.scatter(1, nodes, nodes[:, :1] + branches.depth - 1)
