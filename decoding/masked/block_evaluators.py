"""Block evaluators: logits of several states of each sequence's current block in one forward.

Each class has a method `ask(batch, states)`. `states` [B, M, L] are M states of the block of L
tokens that begins at position `batch.state.start` of each sequence; the result [B, M, L, V] has the
logits of the sequence with each state as its block. Of `batch.state` they read `start`, `given`
(tokens of the prompt), `end` (where the masks of later blocks end) and `cached` (tokens in the
cache), all [B].

    WholeTexts      each state is a whole sequence of the batch: exact for any attention
    CachedBlocks    the states are appended to the cached text, side by side: exact for block-causal
                    attention, where no other token depends on the block
    AppendedBlocks  the same without a cache, for bidirectional attention: *not exact*, because the
                    other blocks attend to the first state only
"""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from decoding.engine.cache import CachedNetwork, CountedNetwork
from decoding.engine.sampler import Batch
from models.blockwise import foreign_logits, is_foreign, predicate_of
from models.masks import Layout, dense


class WholeTexts(CountedNetwork):
    """Evaluates each state as a sequence of its own, without a cache.

    After the block a bidirectional model sees the masks of later blocks, a block-causal one
    nothing.

    Args:
        network: A masked diffusion LM.
        attention: 'bidirectional' or 'block_causal'.
        span: Tokens of a block.
        mask_id: The mask token.
        guidance: Scale w of classifier-free guidance: (1 + w) logits - w logits without the prompt
            (LLaDA, arXiv 2502.09992, Eq. 16); 0 switches it off.
    """

    def __init__(
        self,
        network: PreTrainedModel,
        attention: str,
        span: int,
        mask_id: int,
        guidance: float = 0.0,
    ):
        super().__init__(network)
        self.predicate = predicate_of(attention, span)
        self.later = attention == "bidirectional"
        self.mask_id, self.guidance = mask_id, guidance
        self.cache = self

    def select(self, rows: Tensor) -> None:
        """Nothing is kept between passes."""

    def ask(self, batch: Batch, states: Tensor) -> Tensor:
        """The logits [B, M, L, V] of states [B, M, L]; see the module's docstring."""
        M, L = states.shape[1:]
        texts, at, end = self.texts(batch, L)
        given = batch.state.given[:, None]
        texts, at, end, given = (x.repeat_interleave(M, 0) for x in (texts, at, end, given))
        texts = texts.scatter(1, at, states.flatten(0, 1))
        if not self.guidance:
            return self.block_logits(texts, at, end).unflatten(0, (-1, M))
        positions = torch.arange(texts.shape[1], device=texts.device)
        without = texts.masked_fill(positions < given, self.mask_id)
        logits = self.block_logits(
            torch.cat([texts, without]), torch.cat([at, at]), torch.cat([end, end])
        )
        conditional, unconditional = logits.chunk(2)
        guided = unconditional + (1 + self.guidance) * (conditional - unconditional)
        return guided.unflatten(0, (-1, M))

    def texts(self, batch: Batch, L: int) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens [B, W] with masks from the block on, the block's positions [B, L], ends [B]."""
        start = batch.state.start
        end = batch.state.end if self.later else start + L
        texts = batch.tokens[:, : int(end.max())]
        positions = torch.arange(texts.shape[1], device=texts.device)
        texts = texts.masked_fill(positions >= start[:, None], self.mask_id)
        return texts, start[:, None] + torch.arange(L, device=start.device), end

    def block_logits(self, texts: Tensor, at: Tensor, end: Tensor) -> Tensor:
        """Logits [B, L, V] at positions `at` [B, L] of texts [B, W] that end at `end` [B]."""
        if is_foreign(self.network):
            return self.foreign_block_logits(texts, at, end)
        positions = torch.arange(texts.shape[1], device=texts.device).expand_as(texts)
        # Padding after a text is a document of its own: a query that attends to nothing gives NaN.
        layout = Layout((positions >= end[:, None]).long(), positions, torch.full_like(texts, -1))
        asked = torch.arange(int(at.min()), int(at.max()) + 1, device=texts.device)
        with self.counted():
            logits = self.network(
                input_ids=texts,
                attention_mask=dense(self.predicate, layout),
                position_ids=positions,
                use_cache=False,
                logits_to_keep=asked,
            ).logits
        return at_positions(logits, at - asked[0])

    def foreign_block_logits(self, texts: Tensor, at: Tensor, end: Tensor) -> Tensor:
        """`block_logits` of a model that takes no attention masks: one pass for each length."""
        rows, found = [], []
        with self.counted():
            for length in end.unique().tolist():
                rows.append((end == length).nonzero().flatten())
                logits = foreign_logits(self.network, texts[rows[-1], :length])
                found.append(at_positions(logits, at[rows[-1]]))
        return torch.cat(found)[torch.cat(rows).argsort()]


def at_positions(logits: Tensor, at: Tensor) -> Tensor:
    """The logits [B, L, V] at positions `at` [B, L] of logits [B, W, V]."""
    return logits.gather(1, at[..., None].expand(-1, -1, logits.shape[-1]))


class AppendedBlocks(WholeTexts):
    """Spiffy's appended pass (Fig. 2) on a bidirectional model, which is not exact.

    The first state is in the sequence; a copy of every state is appended at the same positions and
    attends to itself and to the tokens outside the block.
    """

    def ask(self, batch: Batch, states: Tensor) -> Tensor:
        M, L = states.shape[1:]
        texts, at, end = self.texts(batch, L)
        in_text = torch.arange(texts.shape[1], device=texts.device).expand_as(texts)
        copy = torch.arange(M, device=texts.device).repeat_interleave(L).expand(len(texts), -1)
        positions = torch.cat([in_text, at.repeat(1, M)], 1)
        layout = Layout(
            torch.cat([(in_text >= end[:, None]).long(), torch.zeros_like(copy)], 1),
            positions - at[:, :1],
            torch.cat([torch.full_like(texts, -1), copy], 1),
        )
        with self.counted():
            logits = self.network(
                input_ids=torch.cat([texts.scatter(1, at, states[:, 0]), states.flatten(1)], 1),
                attention_mask=dense(self.predicate, layout),
                position_ids=positions,
                use_cache=False,
                logits_to_keep=M * L,
            ).logits
        return logits.unflatten(1, (M, L))


class CachedBlocks(CachedNetwork):
    """Evaluates states with block-causal attention and a KV cache of the finished blocks.

    A finished block enters the cache in its final state, in the pass that begins the next block;
    the prompt enters it in the first pass. Slot s of the cache holds position s. The states use the
    slots after the finished text, for one pass only.

    Args:
        network: A masked diffusion LM with block-causal attention.
        span: Tokens of a block.
        capacity: Slots of the cache.
    """

    def __init__(self, network: PreTrainedModel, span: int, capacity: int):
        super().__init__(network, predicate_of("block_causal", span), capacity)

    def ask(self, batch: Batch, states: Tensor) -> Tensor:
        """The logits [B, M, L, V] of states [B, M, L]; see the module's docstring."""
        M, L = states.shape[1:]
        start, cached = batch.state.start[:, None], batch.state.cached[:, None]
        width = int((start - cached).max())
        finished = start + torch.arange(-width, 0, device=start.device)
        # Batch with less new text are padded on the left.
        padding = finished < cached
        lent = torch.arange(M * L, device=start.device).expand(len(start), -1)
        positions = torch.cat([finished.where(~padding, start), start + lent % L], 1)
        copy = torch.cat([padding.long() - 1, lent // L], 1)
        slots = torch.cat([finished.where(~padding, self.cache.capacity - 1), start + lent], 1)
        keys = self._slots[:, : int(start.max()) + M * L]
        offset = keys - start
        k = Layout(
            # Slots after a row's states are stale; they exist because another row reaches further.
            (offset >= M * L).long(),
            torch.where(offset < 0, keys, start + offset % L),
            torch.where(offset < 0, -1, offset // L),
        )
        q = Layout(torch.zeros_like(copy), positions, copy)
        tokens = batch.tokens.gather(1, finished.clamp_min(0))
        tokens = torch.cat([tokens, states.flatten(1)], 1)
        logits = self.run(tokens, positions, slots, dense(self.predicate, q, k), keep=M * L).logits
        batch.state.cached = batch.state.start
        return logits.unflatten(1, (M, L))
