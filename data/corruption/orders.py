"""Generation orders of any-subset models, and a row laid out as its two streams.

An order is a permutation sigma of a row's N positions, [..., N]: sigma[i] is the position of the
i-th token. Its first m tokens are the prompt; the others are generated one after the other.
"""

import torch
from torch import Generator, Tensor


def binary_lattice(given: Tensor) -> Tensor:
    """The order of AS-ARMs (arXiv 2504.20456, Eq. 4): prompt first, then from left to right.

    given: bool [..., N], True where the token is part of the prompt. Returns sigma [..., N].

    >>> binary_lattice(torch.tensor([False, True, False, True])).tolist()
    [1, 3, 0, 2]
    """
    return (~given).int().argsort(stable=True, dim=-1)


def any_permutation(given: Tensor, generator: Generator) -> Tensor:
    """The ablation of Figure 3: prompt first, then the other positions in any order."""
    return (torch.rand(given.shape, generator=generator) + (~given).float()).argsort(-1)


def order_index(sigma: Tensor, m: Tensor) -> Tensor:
    """Where each position stands in the order, m - 1 for all of the prompt: [..., N].

    sigma [..., N]; m [...] tokens of prompt. A token may see those whose index is not above its
    own, so the prompt sees all of itself and a generated token what came before it.

    >>> order_index(torch.tensor([1, 3, 0, 2]), torch.tensor(2)).tolist()
    [2, 1, 3, 1]
    """
    N = sigma.shape[-1]
    if not torch.equal(
        sigma.sort(-1).values, torch.arange(N, device=sigma.device).expand_as(sigma)
    ):
        raise ValueError(
            f"the order {sigma.tolist()} is no permutation: every position from 0 to {N - 1} "
            "must stand in it once"
        )
    return sigma.argsort(-1).maximum(m.unsqueeze(-1) - 1)


def two_streams(ids: Tensor, index: Tensor, present: Tensor, mask_id: int) -> dict[str, Tensor]:
    """A row as 2N inputs: N tokens of content, then N queries, one about each position.

    ids, index (`order_index`) and present (bool, False for padding): [..., N]. A query is the mask
    token at the position that it asks about, a block of one token in the layout of
    `models.masks.draft_blocks`: it sees the content with a lower index, and itself.
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
