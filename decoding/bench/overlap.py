"""How many tokens of a drafted path can stand at all: Monte Carlo estimates at real prefixes.

However one path Y ~ q is verified, the output X has the law p, and X_1:i = Y_1:i where the first i
tokens stand. No coupling makes that likelier than 1 - TV(p_1:i, q_1:i) = sum_y min(p, q)(y_1:i), so
E[accepted] <= sum_i 1 - TV(p_1:i, q_1:i) (the coupling lemma, position by position). It does not
hold for several paths, as in a tree.

Symbols: N draws behind one prefix, k drafted positions, p_1:i = prod_j p_j(x_j | x_<j) the target's
law of i tokens, q_1:i = prod_j q_j(x_j) that of a drafter whose positions are independent.
"""

import torch
from torch import Tensor

from decoding.engine.params import SamplingParams
from decoding.engine.randomness import KeyedRandomness, Randomness
from decoding.engine.sampler import Rows, Sampler


def overlap(log_p: Tensor, log_q: Tensor) -> Tensor:
    """min(1, p_1:i / q_1:i) of each draw from q: unbiased for 1 - TV(p_1:i, q_1:i).

    1 - TV = E_q[1 - (1 - p/q)^+] = E_q[min(1, p/q)]. log_p, log_q [N, k]: of each drawn token
    given those before it. Returns [N, k].
    Example: ratios p/q of 2 and 1/4: 1 and 1/2 (the first token's surplus counts for the second).
    """
    return (log_p - log_q).cumsum(-1).clamp_max(0).exp()


def mean_of_others(p: Tensor, token: Tensor) -> Tensor:
    """What the other draws' conditionals give a draw's token, on average: [N].

    p [N, V]: the target's distribution at a position behind each of N draws of its own, so that
    the mean over all draws estimates its marginal there; token [N]: what each draw took. Its own
    conditional is left out, because it knows the token's prefix.
    Example: p = [[1, 0], [1/2, 1/2]], tokens 0 and 0: 1/2 and 1.
    """
    return p[:, token].fill_diagonal_(0).sum(0) / (len(p) - 1)


def copies(
    sampler: Sampler, prefix: list[int], params: SamplingParams, draws: int, randomness: Randomness
) -> Rows:
    """Rows that all stand behind the same prefix, which is read once."""
    device = sampler.target.device
    capacity = len(prefix) + params.max_new_tokens + sampler.margin(params)
    rows = Rows([prefix], capacity, KeyedRandomness([0], device), device)
    sampler.begin(rows, params)
    rows.select([0] * draws)
    rows.randomness = randomness
    return rows


def accepted(sampler: Sampler, rows: Rows, k: int, params: SamplingParams) -> Tensor:
    """Whether the first i drafted tokens stand in a cycle of the sampler's own: [N, k] of 0, 1."""
    _, counts = sampler.cycle(rows, params)
    return (counts[:, None] - 1 > torch.arange(k, device=counts.device)).double()


def drafted_paths(sampler: Sampler, rows: Rows, k: int, params: SamplingParams) -> Tensor:
    """`overlap` of target and drafter at paths that the drafter draws: [N, k]."""
    q = sampler.draft_pass(rows, k, params).softmax(-1)
    draft = rows.randomness.categorical(q)
    p = sampler.target_pass(rows, draft, params)[:, :-1].softmax(-1)
    return overlap(_log_chosen(p, draft), _log_chosen(q, draft))


def own_paths(sampler: Sampler, rows: Rows, k: int, params: SamplingParams) -> Tensor:
    """`overlap` of the target and the product of its own marginals: [N, k]. Moves the rows on.

    sum_y min(p, m) = E_p[min(1, m/p)] at paths that the target draws, m_i(x_i) by `mean_of_others`.
    In expectation it is what a drafter reaches that drafts each position from the mean of N - 1
    drawn conditionals. Such a drafter is one of those with independent positions, so the best of
    them reaches no less; N to infinity gives the product of the true marginals, which of all
    products has the least cross-entropy (but not surely the least TV).
    """
    log_p, log_m = [], []
    for _ in range(k):
        p = sampler.target_pass(rows, rows.tokens[:, :0], params)[:, 0].softmax(-1)
        token = rows.randomness.categorical(p)
        log_p.append(_log_chosen(p, token))
        log_m.append(mean_of_others(p.double(), token).log())
        rows.append(token[:, None], torch.ones_like(rows.lengths))
    return overlap(torch.stack(log_m, 1), torch.stack(log_p, 1))


def _log_chosen(probs: Tensor, tokens: Tensor) -> Tensor:
    return probs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1).double().log()
