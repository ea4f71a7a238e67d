"""Masked-diffusion losses and cross-entropies that several methods share."""

from collections.abc import Callable
from functools import wraps

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

# Logits that `in_pieces` computes at a time, by the kind of device: as many as a core's cache holds
# in float32, and as many as keep a GPU busy.
LOGITS = {"cpu": 2**21, "cuda": 2**28}


def in_pieces(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Decorate a loss to compute a few logits at a time, without a float32 copy of all of them.

    The backward pass computes the pieces again. They are element-wise and limited by memory: on a
    CPU, twice in its cache is faster than once in memory.

    Args:
        loss: Maps logits [..., V] and tensors [...] or [..., k] to independent losses [...].
    """

    @wraps(loss)
    def whole(logits: Tensor, *others: Tensor) -> Tensor:
        size = max(1, LOGITS.get(logits.device.type, LOGITS["cuda"]) // logits.shape[-1])
        tokens = logits.shape[:-1]
        if tokens.numel() <= size:
            return loss(logits, *others)
        flat = [x.reshape(tokens.numel(), *x.shape[len(tokens) :]) for x in (logits, *others)]
        pieces = zip(*(x.split(size) for x in flat))
        # The losses draw nothing, so there is no state of randomness to keep.
        kept = {"use_reentrant": False, "preserve_rng_state": False}
        return torch.cat([checkpoint(loss, *piece, **kept) for piece in pieces]).view(tokens)

    return whole


@in_pieces
def token_nll(logits: Tensor, target: Tensor) -> Tensor:
    """Compute the cross-entropy -log p(target) [...] in nats, in at least float32.

    Example: logits [[0, 0]], target [1] give [log 2].

    Args:
        logits: [..., V].
        target: Token ids [...].
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    nll = torch.nn.functional.cross_entropy(
        logits.flatten(0, -2), target.flatten(), reduction="none"
    )
    return nll.view(target.shape)


def denoising_weight(masked: Tensor, t: Tensor, L: Tensor) -> Tensor:
    """Compute weights 1[x_i^t = M] / (t L) of the masked-diffusion bound (LLaDA 2502.09992, Eq. 3).

    Returns [..., K]; 0 for an empty block (L = 0).

    Args:
        masked: bool [..., K], x_i^t = M.
        t: Masking rates [...].
        L: Numbers of clean tokens [...].
    """
    return masked / (t * L.clamp_min(1)).unsqueeze(-1)


@in_pieces
def soft_nll(logits: Tensor, teacher: Tensor) -> Tensor:
    """Compute -sum_v p(v) log q(v) [...] in nats: p = softmax(teacher), q = softmax(logits).

    It is the expectation of `token_nll` over a token sampled from p, so its gradient has the same
    mean and less variance.

    Args:
        logits: [..., V].
        teacher: Logits [..., V']; p covers the tokens that both have, as padding may differ.
    """
    shared = min(logits.shape[-1], teacher.shape[-1])
    log_q = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    p = teacher[..., :shared].to(log_q.dtype).softmax(-1)
    return -(p * log_q[..., :shared]).sum(-1)


@in_pieces
def total_variation(logits: Tensor, teacher: Tensor) -> Tensor:
    """Compute TV(p, q) = 1 - sum_v min(p, q), the probability that rejection sampling rejects.

    Leviathan et al., arXiv 2211.17192, section 3; as a loss: DistillSpec, arXiv 2310.08461.
    Returns [...], in [0, 1]. Example: p = (1/2, 1/2), q = (1/4, 3/4) give 1/4.

    Args:
        logits: [..., V], q = softmax(logits).
        teacher: Logits [..., V'], p = softmax(teacher); both over the tokens that both have.
    """
    shared = min(logits.shape[-1], teacher.shape[-1])
    kind = torch.promote_types(logits.dtype, torch.float32)
    log_p, log_q = (x[..., :shared].to(kind).log_softmax(-1) for x in (teacher, logits))
    return 1 - torch.minimum(log_p, log_q).logsumexp(-1).exp()


@in_pieces
def stored_nll(logits: Tensor, ids: Tensor, probs: Tensor) -> Tensor:
    """Compute `soft_nll` [...] of a teacher whose probabilities are known of k tokens only.

    Example: logits [0, 0], ids [1], probs [1] give log 2.

    Args:
        logits: [..., V].
        ids: The tokens [..., k].
        probs: Their probabilities [..., k]; those of all others count as 0.
    """
    log_q = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    return -(probs.to(log_q.dtype) * log_q.gather(-1, ids)).sum(-1)
