"""Attention patterns as named predicates (design: one predicate, every form of the mask).

A predicate answers "may this query see this key?" from index tensors that describe the layout.
`dense` makes the boolean mask of it (CPU, tests, pictures), `flex` the FlexAttention block mask
(CUDA: on the CPU FlexAttention has no backward).
"""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor


class Layout(NamedTuple):
    """Where each token of a packed row stands; every field is an int tensor [B, L].

    document: tokens of different documents never see each other; -1 is padding, seen by nobody
        but itself.
    index: for a clean token its own index; for a token of a draft block the number of clean
        tokens in front of the block (the block's prefix is every clean token with a lower index).
    block: -1 for clean tokens, else the number of the draft block that the token belongs to.
    """

    document: Tensor
    index: Tensor
    block: Tensor

    def map(self, f: Callable[[Tensor], Tensor]) -> "Layout":
        """Apply f to every field."""
        return Layout(*map(f, self))


Predicate = Callable[[Layout, Layout], Tensor]


def causal(q: Layout, k: Layout) -> Tensor:
    """A token sees its own document up to and including itself."""
    return (q.document == k.document) & (k.index <= q.index)


def draft_blocks(q: Layout, k: Layout) -> Tensor:
    """Clean tokens are causal; a draft block sees its own prefix and the whole of itself.

    No clean token ever sees a block, so the keys and values of a prefix do not depend on what is
    drafted after it: they can be cached, and many blocks can be trained in one forward (DEER).
    """
    clean_key = k.block < 0
    prefix = clean_key & (k.index < q.index + (q.block < 0).to(q.index.dtype))
    own_block = ~clean_key & (k.block == q.block)
    return (q.document == k.document) & (prefix | own_block)


def dense(predicate: Predicate, q: Layout, k: Layout | None = None) -> Tensor:
    """Boolean mask [B, 1, Q, K] (True: may attend) for queries q [B, Q] over keys k [B, K]."""
    k = q if k is None else k
    seen = predicate(q.map(lambda t: t[:, :, None]), k.map(lambda t: t[:, None, :]))
    return seen[:, None]


def flex(predicate: Predicate, layout: Layout):
    """The same pattern as a FlexAttention BlockMask over [B, L] x [B, L] (for CUDA)."""
    from torch.nn.attention.flex_attention import create_block_mask

    def mask_mod(b, h, q, k):
        return predicate(layout.map(lambda t: t[b, q]), layout.map(lambda t: t[b, k]))

    B, L = layout.document.shape
    return create_block_mask(mask_mod, B, None, L, L, device=layout.document.device)


def attention_mask(predicate: Predicate, layout: Layout, implementation: str):
    """The form of the mask that a network's attention implementation takes.

    implementation: `config._attn_implementation` of a transformers model.
    """
    if implementation == "flex_attention":
        return flex(predicate, layout)
    if implementation != "sdpa":
        raise ValueError(
            f"attention implementation {implementation!r} cannot take a custom mask here. "
            "Choose from ['sdpa', 'flex_attention']"
        )
    return dense(predicate, layout)
