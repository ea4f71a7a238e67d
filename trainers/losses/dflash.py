"""Weights of a block's tokens (arXiv 2602.06036)."""

import torch
from torch import Tensor


def decay_weight(masked: Tensor, gamma: float) -> Tensor:
    """Compute weights w_i = exp(-(i - 1) / gamma) [..., K] of a block, i = 1 after the prefix.

    A token counts only if all before it are accepted, so an early one is worth more. Weights are 0
    where a token is not masked. Example: gamma = 1/log 2 gives 1, 1/2, 1/4, ...

    Args:
        masked: bool [..., K], tokens to predict.
        gamma: Positions after which the weight has fallen to 1/e; as published 7 for blocks of 16,
            5 for 10 and 4 for 8.
    """
    i = torch.arange(masked.shape[-1], device=masked.device, dtype=torch.float32)
    return masked * torch.exp(-i / gamma)
