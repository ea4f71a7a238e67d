"""A judge of decoded texts: a causal LM's perplexity, and the entropy of their words."""

import math
from collections import Counter
from typing import NamedTuple

import torch
from torch.distributions import Categorical
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from data.text.chat import encode_text
from decoding.loading import load_tokenizer
from models import causal
from models.context import context
from models.placement import input_device


class Judge(NamedTuple):
    """A causal LM that rates texts, with its tokenizer (arXiv 2504.20456, E.4)."""

    network: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    @classmethod
    def load(cls, model: str, **placing) -> "Judge":
        """Return the judge of a folder's or Hub id's weights, placed as in `decoding.load`."""
        return cls(causal.load(model, **placing), load_tokenizer(model))

    def perplexity(self, text: str) -> float:
        """Return a text's perplexity (Eq. 21), over all tokens but the first.

        Text beyond the judge's context is left out; the perplexity of fewer than two tokens is nan.
        """
        ids = encode_text(self.tokenizer, text)[: context(self.network.config)]
        if len(ids) < 2:
            return math.nan
        given = torch.tensor([ids], device=input_device(self.network))
        with torch.inference_mode():
            logits = self.network(given).logits.float()
        return torch.nn.functional.cross_entropy(logits[0, :-1], given[0, 1:]).exp().item()

    def entropy(self, text: str) -> float:
        """Return the entropy of a text's tokens in bits (Eq. 22); 0 for an empty text."""
        counts = [*Counter(encode_text(self.tokenizer, text)).values()] or [1]
        shares = Categorical(torch.tensor(counts, dtype=torch.float64))
        return shares.entropy().item() / math.log(2)
