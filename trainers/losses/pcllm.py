"""pcLLM's progressive consistency loss, with its autoregressive term (Eq. 8-9).

Shapes: B answers of N blocks of n tokens. Logits [B, N, n, V] are those that predict each token,
that is, the model's outputs at the position before it (with `span=outputs` of `trainers.pcllm`
those at the position itself).
"""

import torch
from torch import Tensor


def progressive_consistency(
    noisy: Tensor, teacher: Tensor, L_AR: Tensor, noised: Tensor, present: Tensor, w: float
) -> tuple[Tensor, Tensor]:
    """The loss of pcLLM, Eq. 9: L_pc + w L_AR, each a mean over the tokens of the answers.

    L_pc (Eq. 8) is the KL divergence of the student's predictions, given noisy blocks, from the
    teacher's, which get no gradient, from the first wrong token of a block on.

    The teacher of a block B_i reads its clean tokens y*_{B_i}. Before them Eq. 8 as printed has the
    *noisy* blocks y^{t_1}_{B_1}, ..., as before the student's; in Figure 1b and in the authors'
    code the teacher's earlier blocks are *clean*, as in Eq. 5. Both are offered
    (`trainers.pcllm`, teacher_context), equal where no token is noised: a clean context teaches
    the model's own greedy choice, a noisy one only what a block's own wrong tokens change.

    Args:
        noisy: logits given noisy blocks [B, N, n, V].
        teacher: logits of the teacher [B, N, n, V].
        L_AR: autoregressive loss of each clean token [B, N, n].
        noised: bool [B, N, n], the predictions that are compared.
        present: bool [B, N, n], tokens of the answer; the others are padding.
        w: weight of L_AR.

    Returns:
        Unreduced loss and weight, [B, N, n] each.
        Example: one token, noised, p = (1/2, 1/2), q = (1/4, 3/4), w = 0: log(4/3) / 2.
    """
    L_pc = noised * divergence(teacher.detach(), noisy)
    return L_pc + w * L_AR, present.float()


def divergence(teacher: Tensor, student: Tensor) -> Tensor:
    """KL divergence D_KL(p || q) of p = softmax(teacher) from q = softmax(student).

    Args:
        teacher: logits [..., V].
        student: logits [..., V].

    Returns:
        [...], in nats.
    """
    kind = torch.promote_types(student.dtype, torch.float32)
    log_p, log_q = teacher.to(kind).log_softmax(-1), student.to(kind).log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)
