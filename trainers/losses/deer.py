"""DEER's two losses (arXiv 2512.15176, section 3.1), for blocks of K drafted tokens.

Shapes: logits [B, A, K, V] and target x^0 [B, A, K] of A blocks a row; i = 1 stands next to the
prefix. Both return (loss, weight), unreduced [B, A, K].
"""

import torch
from torch import Tensor

from trainers.losses.diffusion import denoising_weight, token_nll


def distill(
    logits: Tensor, target: Tensor, masked: Tensor, t: Tensor, L: Tensor
) -> tuple[Tensor, Tensor]:
    """Stage I, Eq. 1-2: sum_i 1[x_i^t = M] / (t L) * -log p(x_i^0 | x^t) over the continuation.

    masked: bool [B, A, K], x_i^t = M. t, L: [B, A], masking rate and length of the continuation.
    Example: K = 2, both masked, t = 1, L = 2, uniform over V: loss log V, weight 1/2 each.
    """
    return token_nll(logits, target), denoising_weight(masked, t, L)


def refine(
    logits: Tensor, target: Tensor, masked: Tensor, R: Tensor, alpha: float
) -> tuple[Tensor, Tensor]:
    """Stage II, Eq. 4: sum_i w_i * -log p(x_i^0 | prefix) over the R masked tokens of a block.

    R: [B, A], masked tokens of the block. Example: R = 2, alpha = 2: weights 2 and 1.
    """
    return token_nll(logits, target), refine_weight(masked, R, alpha)


def refine_weight(masked: Tensor, R: Tensor, alpha: float) -> Tensor:
    """Eq. 3: w_i = alpha^(R - i), i = 1..R: the token next to the prefix weighs most.

    masked: bool [B, A, K]; R: [B, A]. Returns [B, A, K], 0 where nothing is masked.
    """
    i = torch.arange(1, masked.shape[-1] + 1, device=masked.device)
    return masked * alpha ** (R.unsqueeze(-1) - i).float()
