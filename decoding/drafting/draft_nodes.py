"""The nodes of a draft that a drafter reads as it drafts them, and what each attends to."""

import torch
from torch import Tensor
from torch.nn.functional import pad


class DraftNodes:
    """The nodes of a batch's drafts, in the slots of a cache after those of the committed tokens.

    A node attends to all slots up to its root's, to its ancestors and to itself. In a chain each
    node is the parent of the next.

    Args:
        first: [B, 1], the slot of each root, which is its position too.
        capacity: Slots of the cache.
    """

    def __init__(self, first: Tensor, capacity: int):
        self.first, self._slots = first, torch.arange(capacity, device=first.device)[None]
        # Whether a node (row) is after or at another one (column).
        self._after = torch.zeros(len(first), 0, 0, dtype=torch.bool, device=first.device)

    def add(self, parent: Tensor) -> tuple[Tensor, Tensor]:
        """Add nodes by the numbers of their parents [B, M], -1 for the root.

        Nodes are numbered in the order in which they are added. Returns the slots [B, M] of the new
        nodes and their mask, bool [B, 1, M, slots].
        """
        B, M = parent.shape
        before = self._after.shape[1]
        known = pad(self._after, (0, M, 1, 0))  # the first row is the root's
        of = (parent + 1)[..., None].expand(-1, -1, before + M)
        own = pad(torch.eye(M, dtype=torch.bool, device=parent.device), (before, 0))
        new = known.gather(1, of) | own
        self._after = torch.cat([known[:, 1:], new], 1)
        visible = int(self.first.max()) + 1 + before + M
        node = self._slots[:, :visible] - self.first - 1
        is_node = (node >= 0) & (node < before + M)
        at = node.clamp(0, before + M - 1)[:, None].expand(-1, M, -1)
        mask = (node < 0)[:, None] | (is_node[:, None] & new.gather(2, at))
        return self.first + 1 + before + self._slots[:, :M].expand(B, -1), mask[:, None]
