"""The loss of the toy drafter."""

from torch import Tensor

from trainers.losses.diffusion import token_nll


def toy(logits: Tensor, target: Tensor, masked: Tensor) -> tuple[Tensor, Tensor]:
    """-log q(x_i | state) of drafted tokens: (loss, weight), unreduced [B, A, K]."""
    return token_nll(logits, target), masked.float()
