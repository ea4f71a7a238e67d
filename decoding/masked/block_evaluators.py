"""Block evaluators: logits of several states of each sequence's current block in one forward.

Each class has a method `ask(batch, states, ended=None)`. `states` [B, M, L] are M states of the
block of L tokens that begins at position `batch.state.start` of each sequence; the result
[B, M, L, V] has the logits of the sequence with each state as its block. `ended` [B, L] is a full
block: the result then has one more entry, the logits of the next block as masks after it. Of
`batch.state` they read `start`, `given` (tokens of the prompt), `end` (where the masks of later
blocks end) and `cached` (tokens in the cache), all [B].

    WholeTexts      each state is a whole sequence of the batch: exact for any attention
    CachedBlocks    the states are appended to the cached text, side by side: exact for block-causal
                    attention, where no other token depends on the block
"""

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from decoding.engine.batch import Batch
from decoding.engine.cache import CachedNetwork, CountedNetwork
from models.attention import Span, attention_inputs
from models.blockwise import is_foreign, predicate_of
from models.context import clamped
from models.masks import Layout


class WholeTexts(CountedNetwork):
    """Evaluates each state as a sequence of its own, without a cache.

    After the block a bidirectional model sees the masks of later blocks, a block-causal one
    nothing.

    Args:
        network, attention: A masked diffusion LM, 'bidirectional' or 'block_causal'.
        span, mask_id: Tokens of a block, and the mask token.
        guidance: Scale w of classifier-free guidance: (1 + w) logits - w logits without the prompt
            (LLaDA, arXiv 2502.09992, Eq. 16); 0 switches it off.
        shifted: Whether the logits at a position predict the token after it.
    """

    def __init__(
        self,
        network: PreTrainedModel,
        attention: str,
        span: int,
        mask_id: int,
        guidance: float = 0.0,
        shifted: bool = False,
    ):
        super().__init__(network)
        self.predicate = predicate_of(attention, span)
        self.later, self.shift = attention == "bidirectional", int(shifted)
        self.mask_id, self.guidance = mask_id, guidance

    def ask(self, batch: Batch, states: Tensor, ended: Tensor | None = None) -> Tensor:
        """Return the logits [B, M, L, V] of states [B, M, L]; see the module's docstring."""
        M, L = states.shape[1:]
        texts, at, end = (x.repeat_interleave(M, 0) for x in self.texts(batch, L))
        texts = texts.scatter(1, at, states.flatten(0, 1))
        if ended is not None:
            texts, at, end = self.with_next(batch, ended, texts, at, end)
            M += 1
        given = batch.state.given[:, None].repeat_interleave(M, 0)
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

    def with_next(
        self, batch: Batch, ended: Tensor, texts: Tensor, at: Tensor, end: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Add to each sequence's M texts one with a full block `ended` [B, L], then a masked block.

        After a sequence's last block that text is undefined.
        """
        B, L = ended.shape
        start = (batch.state.start + L).minimum(batch.state.end - L)
        more, more_at, more_end = self.texts(batch, L, start)
        more = more.scatter(1, (more_at - L).clamp_min(0), ended)
        width = more.shape[1] - texts.shape[1]
        return tuple(
            torch.cat([x.unflatten(0, (B, -1)), y[:, None]], 1).flatten(0, 1)
            for x, y in ((pad(texts, (0, width)), more), (at, more_at), (end, more_end))
        )

    def texts(
        self, batch: Batch, L: int, start: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return tokens [B, W] with masks from the block on, its positions [B, L], ends [B].

        The block begins at `start` [B]; None: where the current one does.
        """
        start = batch.state.start if start is None else start
        end = batch.state.end if self.later else start + L
        texts = batch.tokens[:, : int(end.max())]
        positions = torch.arange(texts.shape[1], device=texts.device)
        texts = texts.masked_fill(positions >= start[:, None], self.mask_id)
        return texts, start[:, None] + torch.arange(L, device=start.device), end

    def block_logits(self, texts: Tensor, at: Tensor, end: Tensor) -> Tensor:
        """Return logits [B, L, V] of the tokens at `at` [B, L] of texts that end at `end` [B]."""
        at = at - self.shift
        if is_foreign(self.network):
            return self.foreign_block_logits(texts, at, end)
        positions = torch.arange(texts.shape[1], device=texts.device).expand_as(texts)
        # Padding after a text is a document of its own: a query that attends to nothing gives NaN.
        layout = Layout((positions >= end[:, None]).long(), positions, torch.full_like(texts, -1))
        asked = torch.arange(int(at.min()), int(at.max()) + 1, device=texts.device)
        with self.counted():
            logits = self.network(
                input_ids=texts,
                **attention_inputs(self.network, self.predicate, layout),
                position_ids=clamped(positions, self._range),
                use_cache=False,
                logits_to_keep=asked,
            ).logits
        return at_positions(logits, at - asked[0])

    def foreign_block_logits(self, texts: Tensor, at: Tensor, end: Tensor) -> Tensor:
        """Return `block_logits` of a model that takes no masks: one pass for each length."""
        rows, found = [], []
        with self.counted():
            for length in end.unique().tolist():
                rows.append((end == length).nonzero().flatten())
                logits = self.network(input_ids=texts[rows[-1], :length]).logits
                found.append(at_positions(logits, at[rows[-1]]))
        return torch.cat(found)[torch.cat(rows).argsort()]


def at_positions(logits: Tensor, at: Tensor) -> Tensor:
    """Return the logits [B, L, V] at positions `at` [B, L] of logits [B, W, V]."""
    return logits.gather(1, at[..., None].expand(-1, -1, logits.shape[-1]))


def _spans(starts: Tensor, cached: Tensor, width: int, N: int, M: int, L: int) -> list[Span]:
    """Return the parts of a pass, so that a state's logits have the bits that it has alone.

    Each row has the tokens of finished blocks from `cached` to `starts` [B], which end at `width`,
    and then N states of L tokens. Number M, if there is one, is a full block, and the last state
    comes after it.
    """
    found = []
    for b, (start, known) in enumerate(zip(starts.tolist(), cached.tolist())):
        text = slice(start)
        if start > known:
            found.append(Span(b, slice(width - (start - known), width), (text,)))
        for n in range(N):
            first = start + (M if n > M else n) * L
            own = slice(first, start + (n + 1) * L)
            found.append(Span(b, slice(width + n * L, width + (n + 1) * L), (text, own)))
    return found


class CachedBlocks(CachedNetwork):
    """Evaluates states with block-causal attention and a KV cache of the finished blocks.

    A finished block (`span` tokens) enters the cache in the pass that begins the next block, the
    prompt in the first pass. Slot s holds position s; states use the slots after the text, for one
    pass only.
    """

    def __init__(self, network: PreTrainedModel, span: int, mask_id: int, capacity: int):
        super().__init__(network, predicate_of("block_causal", span), capacity)
        self.mask_id = mask_id

    def ask(self, batch: Batch, states: Tensor, ended: Tensor | None = None) -> Tensor:
        """Return the logits [B, M, L, V] of states [B, M, L]; see the module's docstring."""
        M, L = states.shape[1:]
        if ended is not None:  # as text, which the states of its own block do not attend to
            masks = torch.full_like(ended, self.mask_id)
            states = torch.cat([states, torch.stack([ended, masks], 1)], 1)
        N = states.shape[1]
        number = torch.arange(N, device=states.device)
        copy_of = number.where(number != M, -1)
        block_of = (number - M).clamp_min(0)  # 0: the current one
        start, cached = batch.state.start[:, None], batch.state.cached[:, None]
        width = int((start - cached).max())
        finished = start + torch.arange(-width, 0, device=start.device)
        # Rows with less new text are padded on the left.
        padding = finished < cached
        lent = torch.arange(N * L, device=start.device).expand(len(start), -1)
        of = lent // L
        at = start + lent % L + block_of[of] * L
        positions = torch.cat([finished.where(~padding, start), at], 1)
        copy = torch.cat([padding.long() - 1, copy_of[of]], 1)
        slots = torch.cat([finished.where(~padding, self.cache.capacity - 1), start + lent], 1)
        keys = self._slots[:, : int(start.max()) + N * L]
        offset = keys - start
        of = (offset // L).clamp(0, N - 1)
        k = Layout(
            # Slots after a row's states are stale; they exist because another row reaches further.
            (offset >= N * L).long(),
            torch.where(offset < 0, keys, start + offset % L + block_of[of] * L),
            torch.where(offset < 0, -1, copy_of[of]),
        )
        q = Layout(torch.zeros_like(copy), positions, copy)
        tokens = batch.tokens.gather(1, finished.clamp_min(0))
        tokens = torch.cat([tokens, states.flatten(1)], 1)
        asked = (width + lent[0]).unflatten(0, (N, L))[number != M].flatten()
        mask = self.masks(q, k, int(positions.max()) + 1)
        spans = _spans(start[:, 0], cached[:, 0], width, N, M, L) if self.by_row else None
        logits = self.run(tokens, positions, slots, mask, keep=asked, spans=spans).logits
        batch.state.cached = batch.state.start
        return logits.unflatten(1, (-1, L))
