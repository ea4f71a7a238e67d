"""Markov heads: low-rank scores of a drafted token given the one before it.

A block drafter gives each of k positions logits l_i that do not know the tokens drafted before i.
With a Markov head its distributions are conditional,

    log q_i(v | u) = log softmax(l_i + U[u] V^T)(v),

where u is the token before: the last committed one (i = 1) or the drafted one at i - 1. The network
still runs once per block; only the head runs token by token. Source: DSpark (arXiv 2607.05147).
"""

from torch import Tensor, nn


class MarkovHead(nn.Module):
    """The term U[u] V^T of the tokens u before, and v drafted.

    U begins at 0, so a new head changes nothing. The parameters have the names of vLLM's DSpark.

    Args:
        tokens: Rows of U, one for each of the target's tokens.
        drafted: Rows of V, one for each token that the drafter has logits of.
        rank: r, columns of U and V.
    """

    def __init__(self, tokens: int, drafted: int, rank: int):
        super().__init__()
        if not 1 <= rank <= drafted:
            raise ValueError(
                f"markov_rank={rank} is not allowed: it must be from 1 to {drafted}, the "
                "number of tokens that the drafter has"
            )
        self.markov_w1 = nn.Embedding(tokens, rank)  # U
        self.markov_w2 = nn.Linear(rank, drafted, bias=False)  # V
        nn.init.zeros_(self.markov_w1.weight)
        nn.init.normal_(self.markov_w2.weight, std=rank**-0.5)

    def forward(self, previous: Tensor) -> Tensor:
        """Return the term [..., n] to add to the logits after tokens `previous`, int64 [...]."""
        return self.markov_w2(self.markov_w1(previous))
