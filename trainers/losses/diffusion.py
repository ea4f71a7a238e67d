"""Pieces of masked-diffusion losses that several methods share."""

import torch
from torch import Tensor


def token_nll(logits: Tensor, target: Tensor) -> Tensor:
    """-log p(target): logits [..., V], target [...] -> [...], in at least float32.

    Example: logits [[0, 0]], target [1] -> [log 2].
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    nll = torch.nn.functional.cross_entropy(
        logits.flatten(0, -2), target.flatten(), reduction="none"
    )
    return nll.view(target.shape)


def denoising_weight(masked: Tensor, t: Tensor, L: Tensor) -> Tensor:
    """1[x_i^t = M] / (t L) of the masked-diffusion bound (LLaDA, arXiv 2502.09992, Eq. 3).

    masked: bool [..., K], where x^t is the mask. t, L: [...], masking rate and clean length.
    Returns [..., K]; 0 for an empty block (L = 0).
    """
    return masked / (t * L.clamp_min(1)).unsqueeze(-1)


def soft_nll(logits: Tensor, teacher: Tensor) -> Tensor:
    """Cross-entropy -sum_v p(v) log q(v) with a teacher, p = softmax(teacher): [..., V] -> [...].

    The expectation of `token_nll` over the teacher's token: the same gradient on average, without
    the noise of the draw. Vocabularies may be padded differently: p is over what both have.
    """
    shared = min(logits.shape[-1], teacher.shape[-1])
    log_q = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    p = teacher[..., :shared].to(log_q.dtype).softmax(-1)
    return -(p * log_q[..., :shared]).sum(-1)
