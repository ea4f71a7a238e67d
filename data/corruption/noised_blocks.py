"""Corruption of block-wise masked diffusion LMs: all blocks of a row, noised, in one forward."""

import torch
from torch import Generator, Tensor
from transformers import PreTrainedTokenizerBase

from data.corruption.schedules import uniform_times
from data.text.tokenizer import mask_token_id


class NoisedBlocks:
    """Masks each trained token of a block with the block's own rate t ~ U(1/L, 1].

    attention: 'block_causal' puts the noised row behind a clean one that later blocks see;
    'bidirectional' noises a whole document at one rate and needs no clean row. block_size: L.
    tokenizer: with a mask token.
    """

    def __init__(self, attention: str, block_size: int, tokenizer: PreTrainedTokenizerBase):
        if block_size < 1:
            raise ValueError(f"block_size={block_size} is not allowed: it must be at least 1")
        self.copies, self.block_size = attention == "block_causal", block_size
        self.mask_id = mask_token_id(tokenizer)

    def __call__(
        self, row: dict[str, Tensor], generator: Generator, number: int = 0
    ) -> dict[str, Tensor]:
        """A row of `data.rows.packing.PackedRows` ([S] each) -> one sample of the batch.

        input_ids, document, index, block: [2S], clean then noised, or [S], noised; the layout of
        `models.masks.block_causal` and `bidirectional`. target, masked, rate: [S], of the noised.
        """
        ids, document, position = row["input_ids"], row["document"], row["position"]
        units = self.units(document, position)
        smallest = 1 / (self.block_size if self.copies else len(ids))
        rate = uniform_times(int(units[-1]) + 1, smallest, generator)[units]
        masked = torch.rand(len(ids), generator=generator) < rate
        masked &= row["trained"].bool() & (document >= 0)
        noised, clean = ids.masked_fill(masked, self.mask_id), torch.full_like(ids, -1)
        rows = {"input_ids": noised, "document": document, "index": position, "block": clean}
        if self.copies:
            first = {**rows, "input_ids": ids}
            rows["block"] = torch.zeros_like(ids)
            rows = {key: torch.cat([first[key], rows[key]]) for key in rows}
        return {**rows, "target": ids, "masked": masked, "rate": rate}

    def units(self, document: Tensor, position: Tensor) -> Tensor:
        """Which tokens share a rate, as numbers from 0: those of a block, or of a document.

        >>> document, position = torch.tensor([0, 0, 0, 1, 1]), torch.tensor([0, 1, 2, 0, 1])
        >>> blocks = NoisedBlocks.__new__(NoisedBlocks)
        >>> blocks.copies, blocks.block_size = True, 2
        >>> blocks.units(document, position).tolist()
        [0, 0, 1, 2, 2]
        """
        begins = torch.ones_like(document, dtype=torch.bool)
        begins[1:] = document[1:] != document[:-1]
        if self.copies:
            begins |= position % self.block_size == 0
        return begins.cumsum(0) - 1
