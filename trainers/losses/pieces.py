"""Losses of few tokens at a time, so that no copy of all logits in float32 is ever made."""

from collections.abc import Callable
from functools import wraps

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

# Logits of a piece, by the kind of device: what a core's cache holds in float32, and what keeps a
# GPU busy.
LOGITS = {"cpu": 2**21, "cuda": 2**28}


def in_pieces(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A loss whose intermediate results exist for some tokens at a time.

    The backward pass computes them again. They are element-wise and so are limited by memory: on a
    CPU, twice in its cache is faster than once in memory.

    Args:
        loss: Maps logits [..., V] and tensors [...] or [..., k] to the losses [...] of tokens that
            do not depend on each other.

    Returns:
        The same function of the same arguments.
    """

    @wraps(loss)
    def whole(logits: Tensor, *others: Tensor) -> Tensor:
        size = max(1, LOGITS.get(logits.device.type, LOGITS["cuda"]) // logits.shape[-1])
        if logits.shape[:-1].numel() <= size:
            return loss(logits, *others)
        tokens = logits.shape[:-1]
        flat = [x.reshape(tokens.numel(), *x.shape[len(tokens) :]) for x in (logits, *others)]
        pieces = zip(*(x.split(size) for x in flat))
        # The losses draw nothing, so there is no state of randomness to keep.
        kept = {"use_reentrant": False, "preserve_rng_state": False}
        return torch.cat([checkpoint(loss, *piece, **kept) for piece in pieces]).view(tokens)

    return whole
