"""Losses that train what a draft is for: that its tokens stand.

Symbols: p = softmax(teacher), the target's law behind the clean tokens, q = softmax(logits), the
drafter's, each over the tokens that both vocabularies have, at temperature 1. Shapes: teacher,
logits [..., K, V] of K drafted positions; every loss is unreduced, [..., K], at least 0, and 0
where p = q.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad


def total_variation(logits: Tensor, teacher: Tensor) -> Tensor:
    """1 - sum_v min(p, q) = TV(p, q), the chance that one token is rejected.

    Leviathan et al., arXiv 2211.17192, section 3; as a loss: DistillSpec, arXiv 2310.08461.
    Example: p = (1/2, 1/2), q = (1/4, 3/4): 1/4.
    """
    return 1 - _log_overlap(*_laws(logits, teacher)).exp()


def log_acceptance(logits: Tensor, teacher: Tensor) -> Tensor:
    """-log sum_v min(p, q): its gradient does not fade where p and q have little in common.

    Example: p = (1/2, 1/2), q = (1/4, 3/4): log(4/3).
    """
    return -_log_overlap(*_laws(logits, teacher))


def length(logits: Tensor, teacher: Tensor, target: Tensor) -> Tensor:
    """1 - P(the first i tokens stand) under token-by-token rejection; target x [..., K].

    A position counts only if all before it stand: prod_{j<i} min(1, q_j/p_j)(x_j) is the chance
    that they do, given that the target says x, and sum_v min(p_i, q_i) that the next one does. Over
    answers x drawn from p the sum of all i is exactly K - E[accepted]: sum_{x_1:i} prod_j min(p_j,
    q_j). The plainer prod_{j<=i} sum_v min(p_j, q_j) along x is not that expectation, because
    prefixes that stand are not distributed like answers. Derived here.
    Example: K = 2, p = (1/2, 1/2), q = (1/4, 3/4), x_1 = 0: 1/4 and 1 - 1/2 * 3/4 = 5/8.
    """
    log_p, log_q = _laws(logits, teacher)
    ratio = (log_q - log_p).gather(-1, target.unsqueeze(-1)).squeeze(-1)
    before = pad(ratio.clamp_max(0), (1, -1)).cumsum(-1)
    return 1 - (before + _log_overlap(log_p, log_q)).exp()


def coupled_miss(logits: Tensor, teacher: Tensor) -> Tensor:
    """1 - P(argmax(log p + g) = argmax(log q + g)), one Gumbel noise g: a miss of `coupled`.

    -g = log E with E ~ Exp(1), so both choose i where E_j >= E_i max(p_j/p_i, q_j/q_i) for all j:
    P = sum_i 1 / sum_j max(p_j/p_i, q_j/q_i), the probability Jaccard index (Moulton and Jiang,
    arXiv 1809.04052). The maximum is q_j/q_i from i on in the order of q/p and p_j/p_i before, so
    with P_i = sum_{j before i} p_j and Q_i = sum_{j from i on} q_j, i's term is
    min(p_i, q_i) / (P_i min(1, q_i/p_i) + Q_i min(1, p_i/q_i)): all of V, exactly, for one sort.
    The denominator is at least 1, hence the hits are at most sum_v min(p, q).
    Example: p = (1/2, 1/4, 1/4), q = (1/4, 1/4, 1/2): 1 - (1/4 + 1/5 + 1/4) = 0.3.
    """
    log_p, log_q = _laws(logits, teacher)
    order = (log_q - log_p).detach().argsort(-1)
    log_p, log_q = log_p.gather(-1, order), log_q.gather(-1, order)
    before = pad(log_p.exp(), (1, -1)).cumsum(-1)
    from_here = log_q.exp().flip(-1).cumsum(-1).flip(-1)
    rise = log_q - log_p
    total = before * rise.clamp_max(0).exp() + from_here * (-rise).clamp_max(0).exp()
    return 1 - (torch.minimum(log_p, log_q).exp() / total).sum(-1)


def _laws(logits: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    """(log p, log q), renormalised over the tokens that both have."""
    shared = min(logits.shape[-1], teacher.shape[-1])
    kind = torch.promote_types(logits.dtype, torch.float32)
    log_p, log_q = (x[..., :shared].to(kind).log_softmax(-1) for x in (teacher, logits))
    return log_p, log_q


def _log_overlap(log_p: Tensor, log_q: Tensor) -> Tensor:
    return torch.minimum(log_p, log_q).logsumexp(-1)
