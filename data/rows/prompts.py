"""Rows of one prompt each, for calibration."""

import hashlib
import json

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from data.arguments import Count, Split, Tokens
from data.text.prompts import heldout_prompts


class PromptRows(Dataset):
    """A data set of prompts, right-padded: input_ids [length], size [] (tokens of the prompt).

    Args:
        source, split, subset, limit, where, chat: As in `data.text.prompts.prompt_set`.
        count: Number of prompts.
        length: Maximum tokens per prompt.
        tokenizer: Encodes the prompts.
        folder: Ignored; nothing is cached.
    """

    def __init__(
        self,
        source: str,
        count: Count,
        length: Tokens,
        tokenizer: PreTrainedTokenizerBase,
        folder: str | None = None,
        split: Split = "train",
        subset: str | None = None,
        limit: Count | None = None,
        where: str | None = None,
        chat: bool | None = None,
    ):
        del folder  # an argument of every training set
        options: dict = {
            "split": split,
            "subset": subset,
            "limit": limit,
            "where": where,
            "chat": chat,
        }
        found = heldout_prompts(source, tokenizer, count, length, **options)
        self.prompts, self.length = [p["prompt_ids"] for p in found], length
        self.fingerprint = hashlib.sha256(json.dumps(self.prompts).encode()).hexdigest()[:16]

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.tensor(self.prompts[index])
        padded = torch.nn.functional.pad(ids, (0, self.length - len(ids)))
        return {"input_ids": padded, "size": torch.tensor(len(ids))}
