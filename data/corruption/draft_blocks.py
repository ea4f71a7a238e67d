"""Packed draft blocks: many anchors of one row, trained in one forward.

A packed row is the clean row of S tokens followed by A blocks of 1 + K tokens: a separator and K
masked (or partly masked) tokens that continue the row at the block's anchor. An anchor is the
number of clean tokens in front of the block. Positions go on from the prefix: the separator
stands at position n and the i-th drafted token (i = 1..K) at n + i, as in decoding.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Generator, Tensor
from transformers import PreTrainedTokenizerBase

from data.corruption.schedules import masked_at, suffix_lengths, uniform_times
from data.text.tokenizer import draft_token_ids


class Noise(NamedTuple):
    """What a schedule decides about A blocks of K tokens.

    masked: bool [A, K], tokens replaced by the mask. present: bool [A, K], tokens that are there
    at all. rate: [A], the masking rate t.
    """

    masked: Tensor
    present: Tensor
    rate: Tensor


class MaskingSchedule(Protocol):
    """Draws the noise of A blocks of K tokens."""

    def __call__(self, count: int, length: int, generator: Generator) -> Noise:
        """The noise of `count` blocks of `length` tokens."""


class UniformNoise:
    """Every token masked with probability t ~ U(1/K, 1]: stage I and masked diffusion."""

    def __call__(self, count: int, length: int, generator: Generator) -> Noise:
        """See `MaskingSchedule`."""
        rate = uniform_times(count, 1 / length, generator)
        present = torch.ones(count, length, dtype=torch.bool)
        return Noise(masked_at(rate, length, generator), present, rate)


class SuffixNoise:
    """All of the last R ~ U(shortest, K) tokens masked: stage II.

    shortest: 1 is the paper's; K trains just the block that decoding drafts.
    """

    def __init__(self, shortest: int = 1):
        self.shortest = shortest

    def __call__(self, count: int, length: int, generator: Generator) -> Noise:
        """See `MaskingSchedule`."""
        R = suffix_lengths(count, self.shortest, length, generator)
        present = torch.arange(length) < R[:, None]
        return Noise(present, present, torch.ones(count))


class DraftBlocks:
    """Corruption of a packed row: draws anchors and noise, lays the blocks out.

    anchors: A, blocks a row. length: K, drafted tokens a block. tokenizer: with draft tokens.
    """

    def __init__(
        self,
        anchors: int,
        length: int,
        schedule: MaskingSchedule,
        tokenizer: PreTrainedTokenizerBase,
    ):
        if anchors < 1 or length < 1:
            raise ValueError(f"anchors={anchors} and length={length} must both be at least 1")
        self.anchors, self.length, self.schedule = anchors, length, schedule
        self.mask_id, self.sep_id = draft_token_ids(tokenizer)

    def __call__(
        self, row: dict[str, Tensor], generator: Generator, number: int = 0
    ) -> dict[str, Tensor]:
        """A row of `data.rows.packing.PackedRows` ([S] each) -> one sample of the batch.

        input_ids, position_ids, document, index, block: [S + A(1+K)], the layout of
        `models.masks.draft_blocks`. target, masked: [A, K], the clean tokens and where the loss
        stands. rate: [A]. size: [A], tokens of the continuation (L of Eq. 1). start: [A], anchors.
        A row in which nothing is trained has `masked` False everywhere.
        """
        anchor = draw_anchors(row, self.anchors, generator)
        noise = self.schedule(self.anchors, self.length, generator)
        return self.lay_out(row, anchor, noise)

    def lay_out(self, row: dict[str, Tensor], anchor: Tensor, noise: Noise) -> dict[str, Tensor]:
        """The sample of given anchors [A] and noise (pure; see `__call__`)."""
        ids, S = row["input_ids"], len(row["input_ids"])
        A, K = noise.masked.shape
        at = anchor[:, None] + torch.arange(K)
        inside, at = at < S, at.clamp_max(S - 1)
        # The document of the prefix; what follows in another document is no continuation.
        document = row["document"][(anchor - 1).clamp_min(0)]
        inside &= (row["document"][at] == document[:, None]) & (anchor > 0)[:, None]
        inside &= row["trained"][at].bool().cumprod(-1).bool()
        drafted = torch.where(noise.masked | ~inside, self.mask_id, ids[at])
        tokens = torch.cat([torch.full((A, 1), self.sep_id), drafted], 1)
        first = row["position"][(anchor - 1).clamp_min(0)] + 1
        there = torch.cat([torch.ones(A, 1, dtype=torch.bool), noise.present], 1)
        size = (inside & noise.present).sum(1)
        return {
            "input_ids": torch.cat([ids, tokens.flatten()]),
            "position_ids": torch.cat(
                [row["position"], (first[:, None] + torch.arange(1 + K)).flatten()]
            ),
            "document": torch.cat(
                [row["document"], torch.where(there, document[:, None], -1).flatten()]
            ),
            "index": torch.cat([torch.arange(S), anchor.repeat_interleave(1 + K)]),
            "block": torch.cat([torch.full((S,), -1), torch.arange(A).repeat_interleave(1 + K)]),
            "target": ids[at],
            "masked": noise.masked & inside & noise.present,
            "rate": noise.rate,
            "size": size,
            "start": anchor,
        }


def draw_anchors(row: dict[str, Tensor], count: int, generator: Generator) -> Tensor:
    """Anchors [count], uniform over the places whose next token is trained and has a prefix.

    Without replacement while there are enough places; 0 (no block) where there is none.
    """
    document = row["document"]
    joined = torch.zeros_like(document, dtype=torch.bool)
    joined[1:] = (document[1:] == document[:-1]) & (document[1:] >= 0)
    places = (joined & row["trained"].bool()).nonzero().flatten()
    if not len(places):
        return torch.zeros(count, dtype=torch.long)
    order = places[torch.randperm(len(places), generator=generator)]
    return order.repeat(-(-count // len(order)))[:count]
