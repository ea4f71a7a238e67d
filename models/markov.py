"""Markov heads: low-rank scores of a drafted token given the one before it.

A block drafter gives each of k positions logits l_i that do not know the tokens drafted before i.
With a Markov head its distributions are conditional,

    log q_i(v | u) = log softmax(l_i + U[u] V^T)(v),

where u is the token at position i - 1 of the draft. The network still runs once per block; only the
head runs token by token. A block's first token has no term: the network has read the one before
it. DSpark and DFlash 2 publish similar heads.
"""

import torch
from torch import Tensor, nn


class MarkovHead(nn.Module):
    """The term U[u] V^T of n tokens, with matrices U and V of n rows each.

    U begins at 0, so a new head changes nothing.

    Args:
        vocabulary: n, the tokens that the drafter has logits of.
        rank: r, columns of U and V, 1 to n.
    """

    def __init__(self, vocabulary: int, rank: int):
        super().__init__()
        if not 1 <= rank <= vocabulary:
            raise ValueError(
                f"markov_rank={rank} is not allowed: it must be from 1 to {vocabulary}, the "
                "number of tokens that the drafter has"
            )
        self.before = nn.Embedding(vocabulary, rank)
        self.after = nn.Linear(rank, vocabulary, bias=False)
        nn.init.zeros_(self.before.weight)
        nn.init.normal_(self.after.weight, std=rank**-0.5)

    def forward(self, previous: Tensor) -> Tensor:
        """Return the term [..., n] to add to the logits; 0 where `previous` is -1.

        `previous`, int64 [...], holds the tokens u as rows of U; -1 for none, or one without a row.
        """
        known = (previous >= 0).unsqueeze(-1)
        return self.after(torch.where(known, self.before(previous.clamp_min(0)), 0.0))
