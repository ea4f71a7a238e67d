"""The joint loss of any-subset models (arXiv 2504.20456, section 6)."""

from torch import Tensor

from trainers.losses.diffusion import token_nll


def joint(logits: Tensor, target: Tensor, masked: Tensor) -> tuple[Tensor, Tensor]:
    """Eq. 7 by Eq. 2: sum_{i >= m} -log p(x_sigma(i) | x_sigma(<i)), all terms of one forward.

    logits [B, N, V]: at each position, given what stands before it in the order. target [B, N].
    masked: bool [B, N], the positions sigma(>= m). Returns (loss, weight), unreduced [B, N].
    Example: N = 2, the first token given, uniform over V: losses log V, weights 0 and 1.
    """
    return token_nll(logits, target), joint_weight(masked)


def joint_weight(masked: Tensor) -> Tensor:
    """1 where a token is generated, 0 where it is given: [B, N]."""
    return masked.float()
