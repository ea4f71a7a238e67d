"""pcLLM's progressive consistency loss, with its autoregressive term (Eq. 8-9).

Shapes: B answers of N blocks of n tokens. Logits [B, N, n, V] predict each token: they are outputs
at the position before it.
"""

import torch
from torch import Tensor


def progressive_consistency(
    noisy: Tensor, teacher: Tensor, L_AR: Tensor, noised: Tensor, present: Tensor, w: float
) -> tuple[Tensor, Tensor]:
    """Compute the loss of pcLLM, Eq. 9: L_pc + w L_AR, each a mean over the answers' tokens.

    L_pc (Eq. 8) is the KL divergence of the student's predictions, given noisy blocks, from the
    teacher's, which get no gradient, from the first wrong token of a block on.

    The teacher of a block B_i reads its clean tokens y*_{B_i}, and before them *clean* blocks, as
    in Eq. 5, Figure 1b and the authors' code. Eq. 8 as printed has *noisy* ones before them, which
    teach only what a block's own wrong tokens change: worse by 0.12 tokens per forward
    (docs/results/pcllm.md).

    Returns unreduced loss and weight, [B, N, n] each.
    Example: one token, noised, p = (1/2, 1/2), q = (1/4, 3/4), w = 0: log(4/3) / 2.

    Args:
        noisy: Logits given noisy blocks [B, N, n, V].
        teacher: Logits given clean blocks [B, N, n, V].
        L_AR: Autoregressive loss of each clean token [B, N, n].
        noised: bool [B, N, n], tokens from the first wrong one of a block on.
        present: bool [B, N, n], tokens of the answer; the others are padding.
        w: Weight of L_AR.
    """
    L_pc = noised * divergence(teacher.detach(), noisy)
    return L_pc + w * L_AR, present.float()


def divergence(teacher: Tensor, student: Tensor) -> Tensor:
    """Compute D_KL(p || q) [...], in nats, of logits [..., V]: p the teacher, q the student."""
    kind = torch.promote_types(student.dtype, torch.float32)
    log_p, log_q = teacher.to(kind).log_softmax(-1), student.to(kind).log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)
