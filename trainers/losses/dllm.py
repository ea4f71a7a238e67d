"""Masked-diffusion bound of block-wise LMs (LLaDA, arXiv 2502.09992; BD3-LM, 2503.09573)."""

from torch import Tensor

from trainers.losses.diffusion import token_nll


def denoise(logits: Tensor, target: Tensor, masked: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    """Compute LLaDA's Eq. 3: 1[x_i^t = M] / t * -log p(x_i^0 | x^t), each token with its rate t.

    Returns unreduced loss and weight, [B, S] each.
    Example: one token masked at t = 1/2, uniform over V: loss log V, weight 2.

    Args:
        logits: [B, S, V].
        target: Clean tokens [B, S].
        masked: bool [B, S], x_i^t = M.
        t: Masking rates [B, S].
    """
    return token_nll(logits, target), denoise_weight(masked, t)


def denoise_weight(masked: Tensor, t: Tensor) -> Tensor:
    """Compute the weight of `denoise`, 1[x_i^t = M] / t: [B, S]."""
    return masked / t
