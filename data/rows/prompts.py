"""Prompts as the rows of a run: what a model is calibrated on."""

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from data.text.prompts import heldout_prompts


class PromptRows(Dataset):
    """Prompts of at most `length` tokens, padded behind: input_ids [length], size [].

    source, split, count: see `data.text.prompts.heldout_prompts`. Nothing is kept in `folder`.
    """

    def __init__(
        self,
        source: str,
        count: int,
        length: int,
        tokenizer: PreTrainedTokenizerBase,
        folder: str | None = None,
        split: str = "train",
    ):
        del folder  # every training set is given one
        found = heldout_prompts(source, tokenizer, count, length, split=split)
        self.prompts, self.length = [p["prompt_ids"] for p in found], length

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.tensor(self.prompts[index])
        padded = torch.nn.functional.pad(ids, (0, self.length - len(ids)))
        return {"input_ids": padded, "size": torch.tensor(len(ids))}
