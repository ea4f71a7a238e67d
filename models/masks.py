"""Attention patterns as predicates, each with a dense and a FlexAttention mask.

A predicate says, from index tensors that describe queries and keys, whether a query may attend to a
key. `dense` turns it into a boolean mask, `flex` into a FlexAttention block mask (for CUDA: on the
CPU FlexAttention has no backward).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Layout(NamedTuple):
    """The layout of packed rows: int tensors [B, L] that predicates read.

    Attributes:
        document: number of the document; tokens attend only within theirs. -1 is padding, which
            no other token attends to.
        index: of a clean token, its own index; of a token of a draft block, the number of clean
            tokens before the block (the block's prefix is every clean token of a lower index).
        block: number of the draft block; -1 for clean tokens.
    """

    document: Tensor
    index: Tensor
    block: Tensor

    def map(self, f: Callable[[Tensor], Tensor]) -> "Layout":
        """The layout with f applied to every field."""
        return Layout(*map(f, self))


Predicate = Callable[[Layout, Layout], Tensor]
DRAFTERS = ("prefix_causal", "bidirectional", "causal")  # attention of block drafters


def causal(q: Layout, k: Layout) -> Tensor:
    """Causal attention within a document: a token attends to earlier tokens and itself."""
    return (q.document == k.document) & (k.index <= q.index)


def within_document(q: Layout, k: Layout) -> Tensor:
    """Full attention within a document: a token attends to all of it, later tokens included.

    Nothing that such a network computes of a prefix can be cached or shared by two draft blocks:
    what is drafted after the prefix changes it.
    """
    return q.document == k.document


def draft_blocks(q: Layout, k: Layout) -> Tensor:
    """Draft-block attention (DEER): clean tokens are causal, a block attends to prefix and itself.

    No clean token attends to a block, so the keys and values of a prefix do not depend on what is
    drafted after it: they can be cached, and many blocks can be trained in one forward.
    """
    clean_key = k.block < 0
    prefix = clean_key & (k.index < q.index + (q.block < 0).to(q.index.dtype))
    own_block = ~clean_key & (k.block == q.block)
    return (q.document == k.document) & (prefix | own_block)


def numbered_blocks(span: int, causal: bool) -> Predicate:
    """Draft blocks whose tokens are numbered: as `draft_blocks`, or causal within a block (PARD).

    `block` numbers the tokens of blocks: b span + i is token i of block b.

    Args:
        span: tokens per block.
        causal: whether a token of a block attends to none after it.
    """

    def predicate(q: Layout, k: Layout) -> Tensor:
        own = q._replace(block=q.block.div(span, rounding_mode="floor"))
        keys = k._replace(block=k.block.div(span, rounding_mode="floor"))
        seen = draft_blocks(own, keys)
        return seen & ((k.block < 0) | (k.block <= q.block)) if causal else seen

    return predicate


def drafter_attention(name: str, span: int | None = None) -> Predicate:
    """The attention pattern of a block drafter: `draft_blocks`, `within_document` or causal.

    Args:
        name: one of `DRAFTERS`.
        span: tokens per block of a row that has several, which `causal` must tell apart; None: the
            one block is the end of the text.

    Raises:
        ValueError: for another.
    """
    if name not in DRAFTERS:
        raise ValueError(f"unknown attention {name!r}. Choose from {list(DRAFTERS)}")
    if name == "causal":
        return causal if span is None else numbered_blocks(span, causal=True)
    return draft_blocks if name == "prefix_causal" else within_document


def block_width(attention: str, length: int) -> int:
    """Tokens of a draft block in the drafter's input, for `length` drafted ones.

    A separator comes before as many masks; under `causal` the last committed token before one less.
    """
    return length if attention == "causal" else 1 + length


def branches(q: Layout, k: Layout) -> Tensor:
    """Branch attention: a token attends causally to the trunk and to its own branch.

    `index` is the position of every token; tokens of different branches may share one. `block` is
    -1 on the trunk, else the branch. With the prompt as trunk, all noisy blocks as branch 0 and all
    clean blocks as branch 1, this is pcLLM's noise-conditioned mask (NC): a noisy block attends to
    the prompt, earlier noisy blocks and itself. In decoding it verifies several drafts in one pass.
    """
    return causal(q, k) & ((k.block < 0) | (k.block == q.block))


def tree(q: Layout, k: Layout) -> Tensor:
    """Tree attention: a node attends to the committed tokens and to its ancestors and itself.

    `index` is the position. `block` is -1 for committed tokens; for a node it is the set of nodes
    on its path from the root, itself included, as one bit each: another node is an ancestor if its
    set is a subset. Committed tokens are causal.
    """
    return causal(q, k) & ((k.block < 0) | (q.block & k.block == k.block))


def clean_windows(span: int) -> Predicate:
    """pcLLM's ablation NC-IC: `branches`, but noisy blocks attend to *clean* earlier windows.

    Noisy blocks are branch 0, clean ones branch 1; `index` is 0 at the answer's first token.

    Args:
        span: tokens per window.
    """

    def predicate(q: Layout, k: Layout) -> Tensor:
        earlier = _window(k, span) < _window(q, span)
        branch = torch.where((q.block == 0) & earlier, 1, q.block)
        return causal(q, k) & ((k.block < 0) | (k.block == branch))

    return predicate


def taught(student: Predicate, span: int) -> Predicate:
    """pcLLM's Eq. 8 as printed: a clean block attends to itself and to the student's context.

    That is what the noisy block of the same positions sees of earlier blocks. All other tokens
    attend as under the student's pattern.

    Args:
        student: `branches` or `clean_windows`, with noisy blocks as branch 0, clean ones branch 1.
        span: tokens per block.
    """

    def predicate(q: Layout, k: Layout) -> Tensor:
        same = _window(q, span) == _window(k, span)
        own = causal(q, k) & same & (k.block == q.block)
        noisy = q._replace(block=torch.where(q.block == 1, 0, q.block))
        return own | (student(noisy, k) & ~same)

    return predicate


def block_causal(span: int) -> Predicate:
    """Block-causal attention: a token attends to earlier clean blocks and to its own block.

    `index` is the position of every token, so block b is positions b span to (b + 1) span - 1.
    `block` is -1 for the clean text, else the noised copy, or the draft, that the token belongs to;
    within its own block a token attends to tokens of the same copy only. The clean text never
    attends to a copy, so its keys and values can be cached, and all blocks of a text are trained in
    one forward of the clean text and one noised copy (block diffusion, arXiv 2503.09573).

    Args:
        span: tokens per block.
    """
    return _copies(span, torch.lt)


def bidirectional(span: int) -> Predicate:
    """Bidirectional attention: as `block_causal`, with later clean blocks too (Spiffy, Fig. 2)."""
    return _copies(span, torch.ne)


def _copies(span: int, seen: Callable[[Tensor, Tensor], Tensor]) -> Predicate:
    def predicate(q: Layout, k: Layout) -> Tensor:
        key_block, query_block = _window(k, span), _window(q, span)
        others = (k.block < 0) & seen(key_block, query_block)
        own = (k.block == q.block) & (key_block == query_block)
        return (q.document == k.document) & (others | own)

    return predicate


def _window(tokens: Layout, span: int) -> Tensor:
    return tokens.index.div(span, rounding_mode="floor")


def dense(predicate: Predicate, q: Layout, k: Layout | None = None) -> Tensor:
    """The boolean mask of a predicate.

    Args:
        predicate: the attention pattern.
        q: layout of the queries, [B, Q] each field.
        k: layout of the keys, [B, K] each field; that of the queries by default.

    Returns:
        bool [B, 1, Q, K], True where the query may attend to the key.
    """
    k = q if k is None else k
    seen = predicate(q.map(lambda t: t[:, :, None]), k.map(lambda t: t[:, None, :]))
    return seen[:, None]


def flex(predicate: Predicate, layout: Layout):
    """The FlexAttention BlockMask of a predicate over a layout [B, L] (for CUDA)."""
    from torch.nn.attention.flex_attention import create_block_mask

    def mask_mod(b, h, q, k):
        return predicate(layout.map(lambda t: t[b, q]), layout.map(lambda t: t[b, k]))

    B, L = layout.document.shape
    return create_block_mask(mask_mod, B, None, L, L, device=layout.document.device)
