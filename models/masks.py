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
        document: Number of the document; tokens attend only within theirs. -1 is padding, which no
            other token attends to.
        index: A clean token's own index; in a draft block, the number of clean tokens before the
            block (its prefix is every clean token of a lower index).
        block: Number of the draft block; -1 for clean tokens.
        position: A token's position, where `index` is not; None where it is.
    """

    document: Tensor
    index: Tensor
    block: Tensor
    position: Tensor | None = None

    def map(self, f: Callable[[Tensor], Tensor]) -> "Layout":
        """Return the layout with f applied to every field."""
        return Layout(*(None if field is None else f(field) for field in self))

    def positions(self) -> Tensor:
        """Return the position of each token in its text."""
        return self.index if self.position is None else self.position


Predicate = Callable[[Layout, Layout], Tensor]
DRAFTERS = ("prefix_causal", "bidirectional", "causal")  # attention of block drafters


def causal(q: Layout, k: Layout) -> Tensor:
    """Attend causally within a document: a token to earlier tokens and itself."""
    return (q.document == k.document) & (k.index <= q.index)


def within_document(q: Layout, k: Layout) -> Tensor:
    """Attend to the whole document, later tokens included.

    A draft changes the states of its prefix, so these cannot be cached or shared by draft blocks.
    """
    return q.document == k.document


def draft_blocks(q: Layout, k: Layout) -> Tensor:
    """Attend from clean tokens causally, from a draft block to its prefix and itself (DEER).

    No clean token attends to a block, so a prefix's keys and values can be cached, and many blocks
    trained in one forward.
    """
    clean_key = k.block < 0
    prefix = clean_key & (k.index < q.index + (q.block < 0).to(q.index.dtype))
    own_block = ~clean_key & (k.block == q.block)
    return (q.document == k.document) & (prefix | own_block)


def numbered_blocks(span: int, causal: bool) -> Predicate:
    """Return `draft_blocks` for numbered tokens, with `causal` also causal within a block (PARD).

    `block` numbers the tokens of blocks: b span + i is token i of block b.
    """

    def predicate(q: Layout, k: Layout) -> Tensor:
        own = q._replace(block=q.block.div(span, rounding_mode="floor"))
        keys = k._replace(block=k.block.div(span, rounding_mode="floor"))
        seen = draft_blocks(own, keys)
        return seen & ((k.block < 0) | (k.block <= q.block)) if causal else seen

    return predicate


def drafter_attention(name: str, span: int | None = None) -> Predicate:
    """Return a block drafter's pattern, by a name of `DRAFTERS`.

    `span` is the tokens per block of a row with several, which `causal` must tell apart; None means
    that the one block is the end of the text.
    """
    if name not in DRAFTERS:
        raise ValueError(f"unknown attention {name!r}. Choose from {list(DRAFTERS)}")
    if name == "causal":
        return causal if span is None else numbered_blocks(span, causal=True)
    return draft_blocks if name == "prefix_causal" else within_document


def branches(q: Layout, k: Layout) -> Tensor:
    """Attend causally to the trunk and to one's own branch.

    `index` is a token's position, which tokens of different branches may share. `block` is -1 on
    the trunk, else the branch. With the prompt as trunk, all noisy blocks as branch 0 and all clean
    blocks as branch 1, this is pcLLM's noise-conditioned mask (NC): a noisy block attends to the
    prompt, earlier noisy blocks and itself. In decoding it verifies several drafts in one pass.
    """
    return causal(q, k) & ((k.block < 0) | (k.block == q.block))


def tree(q: Layout, k: Layout) -> Tensor:
    """Attend from a node to the committed tokens and to its ancestors and itself.

    `index` is the position. `block` is -1 for committed tokens, which are causal; for a node it is
    the set of nodes on its path from the root, itself included, as one bit each: ancestors have
    subsets.
    """
    return causal(q, k) & ((k.block < 0) | (q.block & k.block == k.block))


def sliding(window: int) -> Predicate:
    """Return the limit of a sliding window: a token attends to no `window`-th token before it.

    Later tokens, which draft blocks may attend to, have no limit.
    """
    return lambda q, k: k.positions() > q.positions() - window


def chunked(size: int) -> Predicate:
    """Return the limit of chunked attention: a token attends to no earlier chunk of `size`."""
    return lambda q, k: k.positions() >= q.positions() // size * size


def limited(predicate: Predicate, limit: Predicate | None) -> Predicate:
    """Return a pattern within a limit; None: without any."""
    return predicate if limit is None else lambda q, k: predicate(q, k) & limit(q, k)


def clean_windows(span: int) -> Predicate:
    """Return pcLLM's ablation NC-IC: `branches`, but noisy blocks see *clean* earlier windows.

    Noisy blocks are branch 0, clean ones branch 1; `index` is 0 at the answer's first token, and a
    window has `span` tokens.
    """

    def predicate(q: Layout, k: Layout) -> Tensor:
        earlier = _window(k, span) < _window(q, span)
        branch = torch.where((q.block == 0) & earlier, 1, q.block)
        return causal(q, k) & ((k.block < 0) | (k.block == branch))

    return predicate


def block_causal(span: int) -> Predicate:
    """Return block-causal attention: a token attends to earlier clean blocks and its own block.

    `index` is a token's position: block b is positions b span to (b + 1) span - 1. `block` is -1
    for the clean text, else the token's noised copy or draft; within a block a token attends only
    to its own copy. Clean text attends to no copy, so its keys and values can be cached, and all
    blocks are trained in one forward of the clean text and a noised copy (block diffusion, arXiv
    2503.09573).
    """
    return _copies(span, torch.lt)


def bidirectional(span: int) -> Predicate:
    """Return `block_causal` attention to later clean blocks too (Spiffy, Fig. 2)."""
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
    """Return a predicate's mask, bool [B, 1, Q, K]: True where the query may attend to the key.

    `q` is the layout of the queries, [B, Q] each field; `k` that of the keys, `q` by default.
    """
    k = q if k is None else k
    seen = predicate(q.map(lambda t: t[:, :, None]), k.map(lambda t: t[:, None, :]))
    return seen[:, None]


def flex(predicate: Predicate, layout: Layout):
    """Return the FlexAttention BlockMask of a predicate over a layout [B, L] (for CUDA)."""
    from torch.nn.attention.flex_attention import create_block_mask

    def mask_mod(b, h, q, k):
        return predicate(layout.map(lambda t: t[b, q]), layout.map(lambda t: t[b, k]))

    B, L = layout.document.shape
    return create_block_mask(mask_mod, B, None, L, L, device=layout.document.device)
