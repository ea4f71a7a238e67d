"""Masked-diffusion losses and cross-entropies that several methods share."""

import torch
from torch import Tensor

from trainers.losses.pieces import in_pieces


@in_pieces
def token_nll(logits: Tensor, target: Tensor) -> Tensor:
    """Unreduced cross-entropy -log p(target), computed in at least float32.

    Args:
        logits: [..., V].
        target: token ids [...].

    Returns:
        [...], in nats. Example: logits [[0, 0]], target [1] give [log 2].
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    nll = torch.nn.functional.cross_entropy(
        logits.flatten(0, -2), target.flatten(), reduction="none"
    )
    return nll.view(target.shape)


def denoising_weight(masked: Tensor, t: Tensor, L: Tensor) -> Tensor:
    """Weights 1[x_i^t = M] / (t L) of the masked-diffusion bound (LLaDA, arXiv 2502.09992, Eq. 3).

    Args:
        masked: bool [..., K], x_i^t = M.
        t: masking rates [...].
        L: numbers of clean tokens [...].

    Returns:
        [..., K]; 0 for an empty block (L = 0).
    """
    return masked / (t * L.clamp_min(1)).unsqueeze(-1)


@in_pieces
def soft_nll(logits: Tensor, teacher: Tensor) -> Tensor:
    """Cross-entropy -sum_v p(v) log q(v) with a teacher, p = softmax(teacher), q = softmax(logits).

    It is the expectation of `token_nll` over a token sampled from p, so its gradient has the same
    mean and less variance.

    Args:
        logits: [..., V].
        teacher: logits [..., V']; p is over the tokens that both vocabularies have (they may be
            padded differently).

    Returns:
        [...], in nats.
    """
    shared = min(logits.shape[-1], teacher.shape[-1])
    log_q = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    p = teacher[..., :shared].to(log_q.dtype).softmax(-1)
    return -(p * log_q[..., :shared]).sum(-1)


@in_pieces
def stored_nll(logits: Tensor, ids: Tensor, probs: Tensor) -> Tensor:
    """`soft_nll` with the k most probable tokens of a teacher, p renormalised over them.

    Args:
        logits: [..., V].
        ids: their tokens [..., k].
        probs: their probabilities [..., k]; all 0 gives a loss of 0.

    Returns:
        [...], in nats. Example: logits [0, 0], ids [1], probs [0.7] give log 2.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    log_q = logits.gather(-1, ids) - logits.logsumexp(-1, keepdim=True)
    p = probs.to(log_q.dtype)
    return -(p * log_q).sum(-1) / p.sum(-1).clamp_min(torch.finfo(p.dtype).tiny)
