"""DEER's loss of stage II (arXiv 2512.15176, section 3.1); stage I's is `trainers.diffusion`'s.

Shapes: B rows of A draft blocks of K tokens; token i = 1 follows the prefix.
"""

import torch
from torch import Tensor

from trainers.losses.diffusion import token_nll


def refine(
    logits: Tensor, target: Tensor, masked: Tensor, R: Tensor, alpha: float
) -> tuple[Tensor, Tensor]:
    """Compute stage II, Eq. 4: sum_i w_i * -log p(x_i^0 | prefix) over a block's R masked tokens.

    Returns unreduced loss and weight, [B, A, K] each. Example: R = 2, alpha = 2: weights 2 and 1.

    Args:
        logits: [B, A, K, V].
        target: Clean tokens x^0 [B, A, K].
        masked: bool [B, A, K].
        R: Masked tokens of each block [B, A].
        alpha: Base of the weights (`refine_weight`).
    """
    return token_nll(logits, target), refine_weight(masked, R, alpha)


def refine_weight(masked: Tensor, R: Tensor, alpha: float) -> Tensor:
    """Compute stage II's weights, Eq. 3: w_i = alpha^(R - i) [B, A, K], largest after the prefix.

    They are 0 where not `masked` [B, A, K]. R [B, A] counts each block's masked tokens.
    As published alpha is 1.01.
    """
    i = torch.arange(1, masked.shape[-1] + 1, device=masked.device)
    return masked * alpha ** (R.unsqueeze(-1) - i).float()
