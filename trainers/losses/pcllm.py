"""pcLLM's progressive consistency loss and the AR loss beside it (Eq. 8-9).

Shapes: N blocks of n tokens an answer; logits [B, N, n, V] *of* each token, that is, taken at the
place before it.
"""

import torch
from torch import Tensor


def progressive_consistency(
    noisy: Tensor, clean: Tensor, L_AR: Tensor, noised: Tensor, present: Tensor, w: float
) -> tuple[Tensor, Tensor]:
    """Eq. 9, L_pc + w L_AR, each a mean over the answer's tokens: (loss, weight) [B, N, n].

    noisy, clean: logits given noisy and given clean blocks. Eq. 8 is the divergence of the first
    from the second, which gets no gradient, from a block's first wrong token on (noised: bool
    [B, N, n]). L_AR [B, N, n]: of each clean token. present: bool [B, N, n], the answer's tokens.
    Example: one token, noised, p = (1/2, 1/2), q = (1/4, 3/4), w = 0: log(4/3) / 2.
    """
    L_pc = noised * divergence(clean.detach(), noisy)
    return L_pc + w * L_AR, present.float()


def divergence(teacher: Tensor, student: Tensor) -> Tensor:
    """D_KL(p || q) of p = softmax(teacher), q = softmax(student): [..., V] -> [...]."""
    kind = torch.promote_types(student.dtype, torch.float32)
    log_p, log_q = teacher.to(kind).log_softmax(-1), student.to(kind).log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)
