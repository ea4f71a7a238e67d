"""Attention patterns as named predicates (design: one predicate, every form of the mask).

A predicate answers "may this query see this key?" from index tensors that describe the layout.
`dense` makes the boolean mask of it (CPU, tests, pictures), `flex` the FlexAttention block mask
(CUDA: on the CPU FlexAttention has no backward).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
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


def branches(q: Layout, k: Layout) -> Tensor:
    """Tokens outside branches are causal; a branch sees those in front of it, and itself causally.

    index: of every token its position, so tokens of different branches may share one. block: -1
    outside, else the branch. With a prompt outside, all noisy blocks as branch 0 and all clean
    blocks as branch 1 this is pcLLM's noise-conditioned mask (NC): a noisy block sees the prompt,
    earlier noisy blocks and itself. In decoding it verifies several drafts in one pass.
    """
    return causal(q, k) & ((k.block < 0) | (k.block == q.block))


def tree(q: Layout, k: Layout) -> Tensor:
    """Tokens outside the tree are causal; a node sees those in front of it, and its own path.

    index: position. block: -1 outside; of a node the set of nodes on its path from the root, one
    bit each, itself included: another node is on it if that one's path is part of it.
    """
    return causal(q, k) & ((k.block < 0) | (q.block & k.block == k.block))


def clean_windows(span: int) -> Predicate:
    """`branches` of noisy (0) and clean (1) blocks, but a noisy one sees *clean* earlier windows.

    pcLLM's ablation NC-IC. span: tokens of a window; index: 0 at the first token of block 1.
    """

    def predicate(q: Layout, k: Layout) -> Tensor:
        earlier = _window(k, span) < _window(q, span)
        read = torch.where((q.block == 0) & earlier, 1, q.block)
        return causal(q, k) & ((k.block < 0) | (k.block == read))

    return predicate


def block_causal(span: int) -> Predicate:
    """A token sees clean blocks of `span` places before its own, and its own block of its own copy.

    index: of every token its position, so block b is the places b span to (b + 1) span - 1. block:
    -1 for the clean text, else which noised copy, or draft, of its block the token belongs to. The
    clean text never sees a copy, so its keys and values can be cached; all blocks of a text train
    in one forward as clean text and one noised copy (block diffusion, arXiv 2503.09573).
    """
    return _copies(span, torch.lt)


def bidirectional(span: int) -> Predicate:
    """The same, but a token sees all other clean blocks, later ones too (Spiffy, Fig. 2)."""
    return _copies(span, torch.ne)


def _copies(span: int, seen: Callable[[Tensor, Tensor], Tensor]) -> Predicate:
    def predicate(q: Layout, k: Layout) -> Tensor:
        there, here = _window(k, span), _window(q, span)
        others = (k.block < 0) & seen(there, here)
        own = (k.block == q.block) & (there == here)
        return (q.document == k.document) & (others | own)

    return predicate


def _window(tokens: Layout, span: int) -> Tensor:
    return tokens.index.div(span, rounding_mode="floor")


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
