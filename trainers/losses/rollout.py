"""Weights of training-time test (EAGLE-3, arXiv 2503.01840, section 3.2)."""

import torch
from torch import Tensor


def step_weight(masked: Tensor, beta: float) -> Tensor:
    """Compute weights beta^(i - 1) [..., K] of steps i = 1 to K; 0 where not `masked` [..., K].

    Example: beta = 1/2 gives 1, 1/2, 1/4, ... Published training code takes 0.8 and 1.
    """
    i = torch.arange(masked.shape[-1], device=masked.device, dtype=torch.float32)
    return masked * beta**i
