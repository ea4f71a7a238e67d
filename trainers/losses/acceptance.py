"""Acceptance losses: how likely verification rejects a drafted token.

Symbols: p = softmax(teacher), the target's distribution given the clean tokens before a position;
q = softmax(logits), the drafter's; both at temperature 1, over the tokens that both vocabularies
have. All functions take logits and teacher [..., K, V] of K drafted positions, and return an
unreduced loss [..., K], which is at least 0, and 0 where p = q.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad


def total_variation(logits: Tensor, teacher: Tensor) -> Tensor:
    """1 - sum_v min(p, q) = TV(p, q), the probability that rejection sampling rejects a token.

    Leviathan et al., arXiv 2211.17192, section 3; as a loss: DistillSpec, arXiv 2310.08461.
    Example: p = (1/2, 1/2), q = (1/4, 3/4): 1/4.
    """
    return 1 - _log_overlap(*_log_probs(logits, teacher)).exp()


def log_acceptance(logits: Tensor, teacher: Tensor) -> Tensor:
    """-log sum_v min(p, q), the negative log of the acceptance probability of a token.

    Unlike that of `total_variation`, its gradient does not vanish where p and q hardly overlap.

    Example: p = (1/2, 1/2), q = (1/4, 3/4): log(4/3).
    """
    return -_log_overlap(*_log_probs(logits, teacher))


def length(logits: Tensor, teacher: Tensor, target: Tensor) -> Tensor:
    """1 - P(tokens 1..i are accepted) under token-by-token rejection, given the target's tokens.

    Token i is accepted only if all tokens before it are. Given that the target generates x, those
    are accepted with probability prod_{j<i} min(1, q_j/p_j)(x_j), and token i with
    sum_v min(p_i, q_i). In expectation over x drawn from p, the sum over i is K - E[accepted]
    exactly, where E[accepted] = sum_i sum_{x_1:i} prod_{j<=i} min(p_j, q_j). The simpler
    prod_{j<=i} sum_v min(p_j, q_j) along x does not give that expectation, because accepted
    prefixes are not distributed like x. Derived here.
    Example: K = 2, p = (1/2, 1/2), q = (1/4, 3/4), x_1 = 0: 1/4 and 1 - 1/2 * 3/4 = 5/8.

    Args:
        logits: the drafter's [..., K, V].
        teacher: the target's logits [..., K, V].
        target: the target's tokens x [..., K].
    """
    log_p, log_q = _log_probs(logits, teacher)
    ratio = (log_q - log_p).gather(-1, target.unsqueeze(-1)).squeeze(-1)
    before = pad(ratio.clamp_max(0), (1, -1)).cumsum(-1)
    return 1 - (before + _log_overlap(log_p, log_q)).exp()


def coupled_miss(logits: Tensor, teacher: Tensor) -> Tensor:
    """1 - P(argmax(log p + g) = argmax(log q + g)) for shared Gumbel noise g: `coupled` rejects.

    -g = log E with E ~ Exp(1), so both choose i if E_j >= E_i max(p_j/p_i, q_j/q_i) for all j:
    P = sum_i 1 / sum_j max(p_j/p_i, q_j/q_i), the probability Jaccard index (Moulton and Jiang,
    arXiv 1809.04052). With tokens sorted by q/p, the maximum is p_j/p_i for j before i and q_j/q_i
    from i on. So with P_i = sum_{j before i} p_j and Q_i = sum_{j from i on} q_j, term i is
    min(p_i, q_i) / (P_i min(1, q_i/p_i) + Q_i min(1, p_i/q_i)): one sort gives the sum over V
    exactly. Each denominator is at least 1, so P is at most sum_v min(p, q).
    Example: p = (1/2, 1/4, 1/4), q = (1/4, 1/4, 1/2): 1 - (1/4 + 1/5 + 1/4) = 0.3.
    """
    log_p, log_q = _log_probs(logits, teacher)
    order = (log_q - log_p).detach().argsort(-1)
    log_p, log_q = log_p.gather(-1, order), log_q.gather(-1, order)
    before = pad(log_p.exp(), (1, -1)).cumsum(-1)
    from_here = log_q.exp().flip(-1).cumsum(-1).flip(-1)
    log_ratio = log_q - log_p
    total = before * log_ratio.clamp_max(0).exp() + from_here * (-log_ratio).clamp_max(0).exp()
    return 1 - (torch.minimum(log_p, log_q).exp() / total).sum(-1)


def _log_probs(logits: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    """(log p, log q), each normalised over the tokens that both vocabularies have."""
    shared = min(logits.shape[-1], teacher.shape[-1])
    kind = torch.promote_types(logits.dtype, torch.float32)
    log_p, log_q = (x[..., :shared].to(kind).log_softmax(-1) for x in (teacher, logits))
    return log_p, log_q


def _log_overlap(log_p: Tensor, log_q: Tensor) -> Tensor:
    return torch.minimum(log_p, log_q).logsumexp(-1)
