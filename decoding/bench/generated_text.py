"""Metrics of generated texts: generative perplexity and entropy (arXiv 2504.20456, E.4)."""

import math
from collections import Counter

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from models.placement import input_device


def generative_perplexity(
    judge: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str
) -> float:
    """Perplexity of a text under a judge, Eq. 21, over all of its tokens but the first.

    Args:
        judge: A causal LM.
        tokenizer: The judge's.
        text: The text; what is beyond the judge's context is left out.

    Returns:
        The perplexity; nan for a text of fewer than two tokens.
    """
    context = getattr(judge.config, "max_position_embeddings", None)
    ids = torch.tensor([tokenizer(text)["input_ids"][:context]], device=input_device(judge))
    if ids.shape[1] < 2:
        return math.nan
    with torch.inference_mode():
        logits: Tensor = judge(ids).logits.float()
    loss = torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:])
    return math.exp(loss.item())


def entropy(ids: list[int]) -> float:
    """Shannon entropy of a text's token frequencies in bits, Eq. 22.

    >>> entropy([7, 8, 7, 8])
    1.0
    """
    shares = [count / len(ids) for count in Counter(ids).values()]
    return -sum(p * math.log2(p) for p in shares)
