"""Generation orders of any-subset models, and the two-stream layout of a row.

An order is a permutation sigma of a row's N positions, [..., N]: sigma[i] is the position of the
i-th token. The first m tokens are the prompt; the others are generated in this order.
"""

import torch
from torch import Generator, Tensor


def binary_lattice(given: Tensor) -> Tensor:
    """Return AS-ARM's generation order sigma [..., N] (arXiv 2504.20456, Eq. 4).

    It is the prompt, then left to right. `given`, bool [..., N], is True at the prompt.

    >>> binary_lattice(torch.tensor([False, True, False, True])).tolist()
    [1, 3, 0, 2]
    """
    return (~given).int().argsort(stable=True, dim=-1)


def any_permutation(given: Tensor, generator: Generator) -> Tensor:
    """Return a random order sigma [..., N], after the prompt, `given` (AS-ARM, Figure 3)."""
    return (torch.rand(given.shape, generator=generator) + (~given).float()).argsort(-1)


def order_index(sigma: Tensor, m: Tensor) -> Tensor:
    """Return the rank [..., N] of each position in an order sigma; m - 1 in the whole prompt.

    A token attends to tokens of at most its own rank: a prompt token to the whole prompt, a
    generated one to all tokens before it. `m` [...] is the prompt's length in tokens.

    >>> order_index(torch.tensor([1, 3, 0, 2]), torch.tensor(2)).tolist()
    [2, 1, 3, 1]
    """
    N = sigma.shape[-1]
    if not torch.equal(
        sigma.sort(-1).values, torch.arange(N, device=sigma.device).expand_as(sigma)
    ):
        raise ValueError(
            f"the order {sigma.tolist()} is no permutation: it must hold every position from 0 to "
            f"{N - 1} once"
        )
    return sigma.argsort(-1).maximum(m.unsqueeze(-1) - 1)


def two_streams(ids: Tensor, index: Tensor, present: Tensor, mask_id: int) -> dict[str, Tensor]:
    """Return the two-stream layout of a row: N content tokens, then a query token for each.

    A query is a mask token at the position that it predicts. In the layout of
    `models.masks.draft_blocks` it is a block of one token: it attends to content tokens of lower
    rank and to itself.

    Args:
        ids: Token ids [..., N].
        index: Ranks in the generation order [..., N], from `order_index`.
        present: bool [..., N], False for padding.
        mask_id: Id of the mask token.

    Returns:
        input_ids, position_ids, document, index, block: [..., 2N] each.
    """
    N = ids.shape[-1]
    positions = torch.arange(N, device=ids.device).expand_as(ids)
    document = present.long() - 1

    def both(content: Tensor, query: Tensor) -> Tensor:
        return torch.cat([content, query], -1)

    return {
        "input_ids": both(ids, torch.full_like(ids, mask_id)),
        "position_ids": both(positions, positions),
        "document": both(document, document),
        "index": both(index, index),
        "block": both(torch.full_like(ids, -1), positions),
    }
