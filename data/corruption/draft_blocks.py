"""Packed draft blocks: many draft blocks of one row, trained in a single forward.

A training sample is the clean row of S tokens, followed by A blocks of W tokens each, which
continue the row at the block's anchor: the number n of clean tokens before the block. There are
four layouts of a block of K drafted tokens, each laid out as in decoding:

- `separator`: a separator at position n and K masked (or partly masked) tokens at n + 1 to n + K,
  so W = 1 + K. The outputs of the masked tokens draft themselves.
- `pard` (arXiv 2504.18583, what vLLM's `parallel_drafting` runs): the last token of the prefix at
  position n - 1 and K - 1 masked tokens at n to n + K - 2, so W = K. Each output drafts the token
  after its input, as a causal LM's does.
- `dflash` (arXiv 2602.06036): the last token of the prefix at position n - 1 and K masked tokens at
  n to n + K - 1, so W = 1 + K. The outputs of the masked tokens draft themselves.
- `dspark` (what engines call `sample_from_anchor`): the tokens of `pard`, so W = K, and each output
  drafts the token after its input; but the block is one, as in `dflash`.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Generator, Tensor
from transformers import PreTrainedTokenizerBase

from data.corpora.answers import TEACHER, TEMPERATURE
from data.corruption.schedules import masked_at, suffix_lengths, uniform_times
from data.text.tokenizer import draft_token_ids

ANCHORED = ("pard", "dspark")  # whose block's first token drafts the first one
SEED = "seed"  # of a sample: of what a module draws for it
STATES = "states"  # a column of rows: a target's hidden states at their tokens (data.rows.states)


class Noise(NamedTuple):
    """The noise of A draft blocks of K tokens.

    Attributes:
        masked: bool [A, K], tokens that are replaced by the mask token.
        present: bool [A, K], tokens that belong to the block; the others are padding.
        rate: [A], the masking rate t of each block.
    """

    masked: Tensor
    present: Tensor
    rate: Tensor


class MaskingSchedule(Protocol):
    """The distribution of the noise of draft blocks."""

    def __call__(self, count: int, length: int, generator: Generator) -> Noise:
        """The noise of `count` (A) blocks of `length` (K) tokens, drawn with `generator`."""


class UniformNoise:
    """Masking schedule of DEER's stage I: each token is masked with probability t ~ U(1/K, 1]."""

    def __call__(self, count: int, length: int, generator: Generator) -> Noise:
        rate = uniform_times(count, 1 / length, generator)
        present = torch.ones(count, length, dtype=torch.bool)
        return Noise(masked_at(rate, length, generator), present, rate)


class SuffixNoise:
    """Masking schedule of DEER's stage II: blocks of R ~ U(shortest, K) tokens, all masked.

    Args:
        shortest: smallest R. 1 as published; K trains only the full block that decoding drafts.
    """

    def __init__(self, shortest: int = 1):
        self.shortest = shortest

    def __call__(self, count: int, length: int, generator: Generator) -> Noise:
        R = suffix_lengths(count, self.shortest, length, generator)
        present = torch.arange(length) < R[:, None]
        return Noise(present, present, torch.ones(count))


class DraftBlocks:
    """The training sample of a drafter: a packed row and A draft blocks at random anchors.

    Args:
        anchors: A, the number of blocks per row.
        length: K, the number of drafted tokens per block.
        schedule: the noise of the blocks.
        tokenizer: one that has the layout's tokens (`data.text.tokenizer.with_draft_tokens`).
        layout: of the blocks: 'separator', 'pard', 'dflash' or 'dspark'.

    Raises:
        ValueError: for fewer than 1 block or token, or a tokenizer without the layout's tokens.
    """

    def __init__(
        self,
        anchors: int,
        length: int,
        schedule: MaskingSchedule,
        tokenizer: PreTrainedTokenizerBase,
        layout: str = "separator",
    ):
        if anchors < 1 or length < 1:
            raise ValueError(f"anchors={anchors} and length={length} must both be at least 1")
        self.anchors, self.length, self.schedule = anchors, length, schedule
        self.mask_id, self.sep_id = draft_token_ids(tokenizer, layout)
        self.layout, self.width = layout, block_width(layout, length)

    def __call__(
        self, row: dict[str, Tensor], generator: Generator, number: int = 0
    ) -> dict[str, Tensor]:
        """One training sample, made from a row of `data.rows.packing.PackedRows` ([S] each).

        Returns:
            input_ids, position_ids, document, index, block: [S + A W] each, the layout of
            `models.masks.draft_blocks`, or of `numbered_blocks`; target, masked: [A, K], the clean
            tokens and the positions that the loss counts; rate: [A]; size: [A], tokens of the
            continuation (L of DEER's Eq. 1); start: [A], the anchors. A row without trained tokens
            has no masked ones. seed: a number for whatever else is drawn. Of teacher answers also
            temperature: [A, K], with their distributions teacher_ids, teacher_probs: [A, K, top_k],
            and of rows with a target's states these: [S, width].
        """
        anchor = draw_anchors(row, self.anchors, generator)
        noise = self.schedule(self.anchors, self.length, generator)
        sample = self.lay_out(row, anchor, noise)
        return sample | {SEED: torch.randint(2**62, (), generator=generator)}

    def lay_out(self, row: dict[str, Tensor], anchor: Tensor, noise: Noise) -> dict[str, Tensor]:
        """The sample of given anchors [A] and noise; deterministic. Returns: see `__call__`."""
        ids, S, W = row["input_ids"], len(row["input_ids"]), self.width
        A, K = noise.masked.shape
        at = anchor[:, None] + torch.arange(K)
        inside, at = at < S, at.clamp_max(S - 1)
        # Tokens of the next document do not continue the prefix, so they are no targets.
        document = row["document"][(anchor - 1).clamp_min(0)]
        inside &= (row["document"][at] == document[:, None]) & (anchor > 0)[:, None]
        inside &= row["trained"][at].bool().cumprod(-1).bool()
        drafted = torch.where(noise.masked | ~inside, self.mask_id, ids[at])
        last = (anchor - 1).clamp_min(0)
        if self.sep_id is None:
            before, own = ids[last][:, None], 1
        else:
            before, own = torch.full((A, 1), self.sep_id), 0
        # `numbered_blocks` counts tokens of blocks, `draft_blocks` blocks.
        block = torch.arange(A).repeat_interleave(W)
        if self.layout == "pard":
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
            **{name: row[name][at] for name in (*TEACHER, TEMPERATURE) if name in row},
            **({STATES: row[STATES]} if STATES in row else {}),
        }


def block_width(layout: str, length: int) -> int:
    """Tokens W of a draft block in a drafter's input, for `length` (K) drafted ones."""
    return length if layout in ANCHORED else 1 + length


def draw_anchors(row: dict[str, Tensor], count: int, generator: Generator) -> Tensor:
    """Random anchors [count] of a packed row: positions of trained tokens that have a prefix.

    Uniform, and without replacement while there are enough such positions. All 0, which means no
    block, where there is none.
    """
    document = row["document"]
    joined = torch.zeros_like(document, dtype=torch.bool)
    joined[1:] = (document[1:] == document[:-1]) & (document[1:] >= 0)
    positions = (joined & row["trained"].bool()).nonzero().flatten()
    if not len(positions):
        return torch.zeros(count, dtype=torch.long)
    order = positions[torch.randperm(len(positions), generator=generator)]
    return order.repeat(-(-count // len(order)))[:count]
