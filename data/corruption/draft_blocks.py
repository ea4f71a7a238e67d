"""Packed draft blocks: many draft blocks of one row, trained in a single forward.

A training sample is the clean row of S tokens, followed by A blocks of W tokens each. A block
continues the row at its anchor, the number n of clean tokens before it, and is laid out as in
decoding (`data.text.layouts`).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Generator, Tensor
from transformers import PreTrainedTokenizerBase

from data.arguments import Small, Tokens
from data.corpora.answers import TEACHER
from data.corruption.schedules import uniform_times
from data.text.layouts import layout_of
from data.text.tokenizer import draft_token_ids

STATES = "states"  # a column of rows: a target's hidden states at their tokens (data.rows.states)


class Noise(NamedTuple):
    """The noise of A draft blocks of K tokens.

    Attributes:
        masked: bool [A, K], tokens replaced by the mask token.
        present: bool [A, K], tokens that belong to the block; the others are padding.
        rate: [A], the masking rate t of each block.
    """

    masked: Tensor
    present: Tensor
    rate: Tensor


# Draws the noise of A blocks of K tokens, (A, K, generator).
MaskingSchedule = Callable[[int, int, Generator], Noise]


class UniformNoise:
    """Masking schedule of DEER's stage I: each token is masked with probability t ~ U(1/K, 1]."""

    def __call__(self, count: int, length: int, generator: Generator) -> Noise:
        rate = uniform_times(count, 1 / length, generator)
        present = torch.ones(count, length, dtype=torch.bool)
        masked = torch.rand(count, length, generator=generator) < rate[:, None]
        return Noise(masked, present, rate)


class SuffixNoise:
    """Masking schedule of DEER's stage II: blocks of R ~ U(shortest, K) tokens, all masked.

    `shortest` is 1 as published; K trains only full blocks, as decoding drafts them.
    """

    def __init__(self, shortest: Tokens = 1):
        self.shortest = shortest

    def __call__(self, count: int, length: int, generator: Generator) -> Noise:
        if self.shortest > length:
            raise ValueError(f"shortest={self.shortest} is not allowed: it must be in 1..{length}")
        R = torch.randint(self.shortest, length + 1, (count,), generator=generator)
        present = torch.arange(length) < R[:, None]
        return Noise(present, present, torch.ones(count))


class DraftBlocks:
    """The training sample of a drafter: a packed row and A draft blocks at random anchors.

    Args:
        anchors: A, the number of blocks per row.
        length: K, the number of drafted tokens per block.
        schedule: The noise of the blocks.
        tokenizer: Has the layout's tokens (`data.text.tokenizer.with_draft_tokens`).
        layout: A name in `data.text.layouts.LAYOUTS`.
    """

    def __init__(
        self,
        anchors: Small,
        length: Tokens,
        schedule: MaskingSchedule,
        tokenizer: PreTrainedTokenizerBase,
        layout: str = "separator",
    ):
        self.anchors, self.length, self.schedule = anchors, length, schedule
        self.mask_id, self.sep_id = draft_token_ids(tokenizer, layout)
        self.layout = layout_of(layout)
        self.width = self.layout.width(length)

    def __call__(
        self, row: dict[str, Tensor], generator: Generator, number: int = 0
    ) -> dict[str, Tensor]:
        """Return a training sample, made from a row of `data.rows.packing.PackedRows` ([S] each).

        Returns:
            input_ids, position_ids, document, index, block: [S + A W] each, the layout of
            `models.masks.draft_blocks` or `numbered_blocks`; target: [A, K], the clean tokens;
            masked: [A, K], True where the loss counts (nowhere in a row without trained tokens);
            rate: [A]; size: [A], tokens of the continuation (L of DEER's Eq. 1); start: [A], the
            anchors; if the row has them, teacher_ids and teacher_probs: [A, K, top_k], and states:
            [S, width].
        """
        anchor = draw_anchors(row, self.anchors, generator)
        noise = self.schedule(self.anchors, self.length, generator)
        return self.lay_out(row, anchor, noise)

    def lay_out(self, row: dict[str, Tensor], anchor: Tensor, noise: Noise) -> dict[str, Tensor]:
        """Return the sample for given anchors [A] and noise; deterministic. See `__call__`."""
        ids, S, W = row["input_ids"], len(row["input_ids"]), self.width
        A, K = noise.masked.shape
        at = anchor[:, None] + torch.arange(K)
        inside, at = at < S, at.clamp_max(S - 1)
        # Tokens of the next document do not continue the prefix, so they are no targets.
        document = row["document"][(anchor - 1).clamp_min(0)]
        inside &= (row["document"][at] == document[:, None]) & (anchor > 0)[:, None]
        inside &= row["trained"][at].bool().cumprod(-1).bool()
        mask_id = 0 if self.mask_id is None else self.mask_id  # no block is read: W = 0
        drafted = torch.where(noise.masked | ~inside, mask_id, ids[at])
        last = (anchor - 1).clamp_min(0)
        if self.sep_id is None:
            before, own = ids[last][:, None], 1
        else:
            before, own = torch.full((A, 1), self.sep_id), 0
        # `numbered_blocks` counts tokens of blocks, `draft_blocks` blocks.
        block = torch.arange(A).repeat_interleave(W)
        if self.layout.attention == "causal":
            block = torch.arange(A * W)
        tokens = torch.cat([before, drafted], 1)[:, :W]
        first = row["position"][last] + 1 - own
        present = torch.cat([torch.ones(A, 1, dtype=torch.bool), noise.present], 1)[:, :W]
        size = (inside & noise.present).sum(1)
        return {
            "input_ids": torch.cat([ids, tokens.flatten()]),
            "position_ids": torch.cat(
                [row["position"], (first[:, None] + torch.arange(W)).flatten()]
            ),
            "document": torch.cat(
                [row["document"], torch.where(present, document[:, None], -1).flatten()]
            ),
            # The prefix's last token, where it is the block's own, is not in the prefix.
            "index": torch.cat([torch.arange(S), (anchor - own).repeat_interleave(W)]),
            "block": torch.cat([torch.full((S,), -1), block]),
            "target": ids[at],
            "masked": noise.masked & inside & noise.present,
            "rate": noise.rate,
            "size": size,
            "start": anchor,
            **{name: row[name][at] for name in TEACHER if name in row},
            **({STATES: row[STATES]} if STATES in row else {}),
        }


def draw_anchors(row: dict[str, Tensor], count: int, generator: Generator) -> Tensor:
    """Return random anchors [count] of a packed row: positions of trained tokens with a prefix.

    They are uniform, without replacement while there are enough, and ascend, so that neighbouring
    blocks read much the same prefix. If there are none, all are 0, which means no block.
    """
    document = row["document"]
    joined = torch.zeros_like(document, dtype=torch.bool)
    joined[1:] = (document[1:] == document[:-1]) & (document[1:] >= 0)
    positions = (joined & row["trained"].bool()).nonzero().flatten()
    if not len(positions):
        return torch.zeros(count, dtype=torch.long)
    order = positions[torch.randperm(len(positions), generator=generator)]
    return order.repeat(-(-count // len(order)))[:count].sort().values
