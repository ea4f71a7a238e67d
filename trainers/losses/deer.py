"""DEER's weights of stage II (arXiv 2512.15176, section 3.1); stage I's are `trainers.diffusion`'s.

The loss is Eq. 4, sum_i w_i * -log p(x_i^0 | prefix) over a block's R masked tokens. Shapes: B rows
of A draft blocks of K tokens; token i = 1 follows the prefix.
"""

import torch
from torch import Tensor


def refine_weight(masked: Tensor, R: Tensor, alpha: float) -> Tensor:
    """Compute stage II's weights, Eq. 3: w_i = alpha^(R - i) [B, A, K], largest after the prefix.

    They are 0 where not `masked` [B, A, K]. R [B, A] counts each block's masked tokens.
    As published alpha is 1.01.
    """
    i = torch.arange(1, masked.shape[-1] + 1, device=masked.device)
    return masked * alpha ** (R.unsqueeze(-1) - i).float()
