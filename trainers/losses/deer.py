"""DEER's losses of stages I and II (arXiv 2512.15176, section 3.1).

Shapes: B rows of A draft blocks of K tokens; token i = 1 follows the prefix.
"""

import torch
from torch import Tensor

from trainers.losses.diffusion import denoising_weight, token_nll


def distill(
    logits: Tensor, target: Tensor, masked: Tensor, t: Tensor, L: Tensor
) -> tuple[Tensor, Tensor]:
    """Stage I, Eq. 1-2: sum_i 1[x_i^t = M] / (t L) * -log p(x_i^0 | x^t) over the continuation.

    Args:
        logits: [B, A, K, V].
        target: clean tokens x^0 [B, A, K].
        masked: bool [B, A, K], x_i^t = M.
        t: masking rates [B, A].
        L: lengths of the continuations [B, A], in tokens.

    Returns:
        Unreduced loss and weight, [B, A, K] each.
        Example: K = 2, both masked, t = 1, L = 2, uniform over V: loss log V, weight 1/2 each.
    """
    return token_nll(logits, target), denoising_weight(masked, t, L)


def refine(
    logits: Tensor, target: Tensor, masked: Tensor, R: Tensor, alpha: float
) -> tuple[Tensor, Tensor]:
    """Stage II, Eq. 4: sum_i w_i * -log p(x_i^0 | prefix) over the R masked tokens of a block.

    Args:
        logits: [B, A, K, V].
        target: clean tokens x^0 [B, A, K].
        masked: bool [B, A, K].
        R: masked tokens of each block [B, A].
        alpha: base of the weights (`refine_weight`).

    Returns:
        Unreduced loss and weight, [B, A, K] each. Example: R = 2, alpha = 2: weights 2 and 1.
    """
    return token_nll(logits, target), refine_weight(masked, R, alpha)


def refine_weight(masked: Tensor, R: Tensor, alpha: float) -> Tensor:
    """Weights of stage II, Eq. 3: w_i = alpha^(R - i), largest for the token after the prefix.

    Args:
        masked: bool [B, A, K].
        R: masked tokens of each block [B, A].
        alpha: 1.01 as published.

    Returns:
        [B, A, K], 0 where a token is not masked.
    """
    i = torch.arange(1, masked.shape[-1] + 1, device=masked.device)
    return masked * alpha ** (R.unsqueeze(-1) - i).float()
