"""Masking for block-wise diffusion LMs: every block of a row is noised in one training sample."""

import torch
from torch import Generator, Tensor
from transformers import PreTrainedTokenizerBase

from data.arguments import BlockSize
from data.corruption.schedules import uniform_times
from data.text.tokenizer import mask_token_id


class NoisedBlocks:
    """Random masking of trained tokens, at a masking rate t ~ U(1/L, 1] per block.

    Args:
        attention: 'block_causal' appends the noised row to a clean copy, which later blocks attend
            to; 'bidirectional' uses one rate per document and no clean copy.
        block_size: L, in tokens.
        tokenizer: Has a mask token.
    """

    def __init__(self, attention: str, block_size: BlockSize, tokenizer: PreTrainedTokenizerBase):
        self.copies, self.block_size = attention == "block_causal", block_size
        self.mask_id = mask_token_id(tokenizer)

    def __call__(
        self, row: dict[str, Tensor], generator: Generator, number: int = 0
    ) -> dict[str, Tensor]:
        """Return a training sample, made from a row of `data.rows.packing.PackedRows` ([S] each).

        Returns:
            input_ids, document, index, block: [2S] (clean, then noised tokens) or [S] (noised), the
            layout of `models.masks.block_causal` or `bidirectional`; target, masked, rate of noised
            tokens: [S].
        """
        ids, document, position = row["input_ids"], row["document"], row["position"]
        groups = self.rate_groups(document, position)
        smallest = 1 / (self.block_size if self.copies else len(ids))
        rate = uniform_times(int(groups[-1]) + 1, smallest, generator)[groups]
        masked = torch.rand(len(ids), generator=generator) < rate
        masked &= row["trained"].bool() & (document >= 0)
        noised, clean = ids.masked_fill(masked, self.mask_id), torch.full_like(ids, -1)
        rows = {"input_ids": noised, "document": document, "index": position, "block": clean}
        if self.copies:
            first = {**rows, "input_ids": ids}
            rows["block"] = torch.zeros_like(ids)
            rows = {key: torch.cat([first[key], rows[key]]) for key in rows}
        return {**rows, "target": ids, "masked": masked, "rate": rate}

    def rate_groups(self, document: Tensor, position: Tensor) -> Tensor:
        """Return the masking-rate group of each token [S], from 0: its block, or its document.

        >>> document, position = torch.tensor([0, 0, 0, 1, 1]), torch.tensor([0, 1, 2, 0, 1])
        >>> blocks = NoisedBlocks.__new__(NoisedBlocks)
        >>> blocks.copies, blocks.block_size = True, 2
        >>> blocks.rate_groups(document, position).tolist()
        [0, 0, 1, 2, 2]
        """
        begins = torch.ones_like(document, dtype=torch.bool)
        begins[1:] = document[1:] != document[:-1]
        if self.copies:
            begins |= position % self.block_size == 0
        return begins.cumsum(0) - 1
