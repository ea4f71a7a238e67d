"""Joint loss of any-subset models (AS-ARM, arXiv 2504.20456, section 6)."""

from torch import Tensor

from trainers.losses.diffusion import token_nll


def joint(logits: Tensor, target: Tensor, masked: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the joint loss, Eq. 7 with Eq. 2: sum_{i >= m} -log p(x_sigma(i) | x_sigma(<i)).

    Returns unreduced loss and weight, [B, N] each.
    Example: N = 2, the first token given, uniform over V: losses log V, weights 0 and 1.

    Args:
        logits: [B, N, V], at each position given the tokens before it in the order.
        target: [B, N], clean tokens.
        masked: bool [B, N], the positions sigma(>= m).
    """
    return token_nll(logits, target), joint_weight(masked)


def joint_weight(masked: Tensor) -> Tensor:
    """Compute the weight of `joint`, [B, N]: 1 where a token is generated, 0 in the prompt."""
    return masked.float()
