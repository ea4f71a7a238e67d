"""DFlash's loss (arXiv 2602.06036): cross-entropy of a block, weighted towards its first tokens."""

import torch
from torch import Tensor


def decay_weight(masked: Tensor, gamma: float) -> Tensor:
    """Weights w_i = exp(-(i - 1) / gamma) of the tokens of a block, i = 1 after the prefix.

    A token counts only where all before it are accepted, so an early one is worth more.

    Args:
        masked: bool [..., K], tokens to predict.
        gamma: Positions after which the weight has fallen to 1/e; as published 7 for blocks of 16,
            5 for 10 and 4 for 8. infinity: all tokens weigh the same.

    Returns:
        [..., K], 0 where a token is not masked. Example: gamma = 1/log 2 gives 1, 1/2, 1/4, ...
    """
    i = torch.arange(masked.shape[-1], device=masked.device)
    return masked * torch.exp(-i / gamma)
