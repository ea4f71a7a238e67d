"""Weights of a block's tokens: DFlash's own (arXiv 2602.06036) and D-PACE's (2605.18810)."""

import torch
from torch import Tensor


def decay_weight(masked: Tensor, gamma: float) -> Tensor:
    """Compute weights w_i = exp(-(i - 1) / gamma) [..., K] of a block, i = 1 after the prefix.

    A token counts only if all before it are accepted, so an early one is worth more. Weights are 0
    where a token is not masked. Example: gamma = 1/log 2 gives 1, 1/2, 1/4, ...

    Args:
        masked: bool [..., K], tokens to predict.
        gamma: Positions after which the weight has fallen to 1/e; as published 7 for blocks of 16,
            5 for 10 and 4 for 8. Infinity: equal weights.
    """
    i = torch.arange(masked.shape[-1], device=masked.device)
    return masked * torch.exp(-i / gamma)


def adaptive_weight(nll: Tensor, masked: Tensor, alpha: float) -> Tensor:
    """Compute D-PACE's weights [..., K]: each token's contribution to the expected accepted length.

    With q_i the drafter's probability of token i, smoothed to s_i = (1 - alpha) q_i + alpha, the
    chance that the first j tokens are accepted is P_j = s_1 ... s_j, and w_j = P_j + ... + P_K:
    the derivative of P_1 + ... + P_K with respect to log s_j. Weights are float32, no gradient.

    Args:
        nll: [..., K], -log q of the tokens.
        masked: bool [..., K], tokens to predict; the others have q = 0 and weight 0.
        alpha: Smoothing, in (0, 1]; 1: w_j = K - j + 1 for any drafter.
    """
    q = torch.exp(-nll.detach().float()) * masked
    P = torch.cumprod((1 - alpha) * q + alpha, -1) * masked
    return P.flip(-1).cumsum(-1).flip(-1) * masked
