"""The masked diffusion bound of block-wise LMs (LLaDA, arXiv 2502.09992; BD3-LM, 2503.09573)."""

from torch import Tensor

from trainers.losses.diffusion import token_nll


def denoise(logits: Tensor, target: Tensor, masked: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    """LLaDA, Eq. 3: 1[x_i^t = M] / t * -log p(x_i^0 | x^t), with each token's own rate t.

    logits [B, S, V]; target, masked (bool), t: [B, S]. Returns (loss, weight), unreduced [B, S].
    Example: one token masked at t = 1/2, uniform over V: loss log V, weight 2.
    """
    return token_nll(logits, target), denoise_weight(masked, t)


def denoise_weight(masked: Tensor, t: Tensor) -> Tensor:
    """1[x_i^t = M] / t: [B, S]."""
    return masked / t
