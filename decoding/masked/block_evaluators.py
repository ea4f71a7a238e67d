"""States of each text's current block, evaluated by a masked diffusion LM in one forward.

Each class answers `ask`: states [B, M, L], M states of the block of L tokens that begins at place
`start` of each row's text. Returns logits [B, M, L, V]: those of the text with each state in the
block's place. Of `rows.state` they read start, given (tokens of the prompt), end (where the masks
of later blocks end) and cached (tokens that a cache knows), all [B].

    WholeTexts      each state is a text of its own in the batch: exact for any attention
    CachedBlocks    the states stand side by side behind the cached text: exact, and only there,
                    where nothing outside of the block depends on it (block-causal attention)
    AppendedBlocks  the same without a cache for bidirectional attention: *not exact*, as the other
                    blocks have seen the first state only
"""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from decoding.engine.cache import CachedNetwork, CountedNetwork
from decoding.engine.sampler import Rows
from models.blockwise import foreign_logits, is_foreign, predicate_of
from models.masks import Layout, dense


class WholeTexts(CountedNetwork):
    """No cache. Behind the block stand the masks of later ones, or nothing (block-causal).

    guidance: classifier-free guidance w, (1 + w) logits - w logits without the prompt (LLaDA,
    arXiv 2502.09992, Eq. 16); 0 is off.
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

    def ask(self, rows: Rows, states: Tensor) -> Tensor:
        """See the module."""
        M, L = states.shape[1:]
        texts, at, end = self.texts(rows, L)
        given = rows.state["given"][:, None]
        texts, at, end, given = (x.repeat_interleave(M, 0) for x in (texts, at, end, given))
        texts = texts.scatter(1, at, states.flatten(0, 1))
        if not self.guidance:
            return self.block_logits(texts, at, end).unflatten(0, (-1, M))
        places = torch.arange(texts.shape[1], device=texts.device)
        without = texts.masked_fill(places < given, self.mask_id)
        logits = self.block_logits(
            torch.cat([texts, without]), torch.cat([at, at]), torch.cat([end, end])
        )
        conditional, unconditional = logits.chunk(2)
        guided = unconditional + (1 + self.guidance) * (conditional - unconditional)
        return guided.unflatten(0, (-1, M))

    def texts(self, rows: Rows, L: int) -> tuple[Tensor, Tensor, Tensor]:
        """The texts [B, W], masks from the block on; the block's places [B, L]; the ends [B]."""
        start = rows.state["start"]
        end = rows.state["end"] if self.later else start + L
        texts = rows.tokens[:, : int(end.max())]
        places = torch.arange(texts.shape[1], device=texts.device)
        texts = texts.masked_fill(places >= start[:, None], self.mask_id)
        return texts, start[:, None] + torch.arange(L, device=start.device), end

    def block_logits(self, texts: Tensor, at: Tensor, end: Tensor) -> Tensor:
        """Logits [B, L, V] at places `at` of texts that end at `end`."""
        if is_foreign(self.network):
            return self.foreign_block_logits(texts, at, end)
        places = torch.arange(texts.shape[1], device=texts.device).expand_as(texts)
        # What lies behind a text is another document, so that it sees something as well.
        layout = Layout((places >= end[:, None]).long(), places, torch.full_like(texts, -1))
        asked = torch.arange(int(at.min()), int(at.max()) + 1, device=texts.device)
        with self.counted():
            logits = self.network(
                input_ids=texts,
                attention_mask=dense(self.predicate, layout),
                position_ids=places,
                use_cache=False,
                logits_to_keep=asked,
            ).logits
        return at_places(logits, at - asked[0])

    def foreign_block_logits(self, texts: Tensor, at: Tensor, end: Tensor) -> Tensor:
        """The same by a model that takes no masks: texts of one length together."""
        rows, found = [], []
        with self.counted():
            for length in end.unique().tolist():
                rows.append((end == length).nonzero().flatten())
                logits = foreign_logits(self.network, texts[rows[-1], :length])
                found.append(at_places(logits, at[rows[-1]]))
        return torch.cat(found)[torch.cat(rows).argsort()]


def at_places(logits: Tensor, at: Tensor) -> Tensor:
    """Of logits [B, W, V] those at places [B, L]: [B, L, V]."""
    return logits.gather(1, at[..., None].expand(-1, -1, logits.shape[-1]))


class AppendedBlocks(WholeTexts):
    """The paper's pass (Fig. 2) on a bidirectional model: see the module."""

    def ask(self, rows: Rows, states: Tensor) -> Tensor:
        """See the module."""
        M, L = states.shape[1:]
        texts, at, end = self.texts(rows, L)
        places = torch.arange(texts.shape[1], device=texts.device).expand_as(texts)
        copy = torch.arange(M, device=texts.device).repeat_interleave(L).expand(len(texts), -1)
        positions = torch.cat([places, at.repeat(1, M)], 1)
        layout = Layout(
            torch.cat([(places >= end[:, None]).long(), torch.zeros_like(copy)], 1),
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
    """Block-causal attention with the finished blocks' keys and values cached.

    A finished block goes in whole and clean, in the pass that begins the next one; the prompt does
    so in the first pass. Slot s holds the token at place s; the states are lent the slots behind
    the finished text for one pass.
    """

    def __init__(self, network: PreTrainedModel, span: int, capacity: int):
        super().__init__(network, predicate_of("block_causal", span), capacity)

    def ask(self, rows: Rows, states: Tensor) -> Tensor:
        """See the module."""
        M, L = states.shape[1:]
        start, cached = rows.state["start"][:, None], rows.state["cached"][:, None]
        width = int((start - cached).max())
        finished = start + torch.arange(-width, 0, device=start.device)
        # Rows with less new text are padded on the left.
        padding = finished < cached
        lent = torch.arange(M * L, device=start.device).expand(len(start), -1)
        positions = torch.cat([finished.where(~padding, start), start + lent % L], 1)
        copy = torch.cat([padding.long() - 1, lent // L], 1)
        slots = torch.cat([finished.where(~padding, self.cache.capacity - 1), start + lent], 1)
        keys = self._slots[:, : int(start.max()) + M * L]
        behind = keys - start
        k = Layout(
            # A row's slots behind its states are stale: another row may reach further.
            (behind >= M * L).long(),
            torch.where(behind < 0, keys, start + behind % L),
            torch.where(behind < 0, -1, behind // L),
        )
        q = Layout(torch.zeros_like(copy), positions, copy)
        tokens = rows.tokens.gather(1, finished.clamp_min(0))
        tokens = torch.cat([tokens, states.flatten(1)], 1)
        logits = self.run(tokens, positions, slots, dense(self.predicate, q, k), keep=M * L)
        rows.state["cached"] = rows.state["start"]
        return logits.unflatten(1, (M, L))
