"""Upper bounds of the accepted tokens of one drafted path: Monte Carlo estimates at real prefixes.

However one path Y ~ q is verified, the output X has the distribution p, and X_1:i = Y_1:i where the
first i tokens are accepted. No coupling makes that likelier than
1 - TV(p_1:i, q_1:i) = sum_y min(p, q)(y_1:i), so E[accepted] <= sum_i 1 - TV(p_1:i, q_1:i) (the
coupling lemma, position by position). It does not hold for several paths, as in a tree, of which
`own_trees` simulates the best drafter with independent positions.

Symbols: N draws after one prefix, k drafted positions, p_1:i = prod_j p_j(x_j | x_<j) the target's
distribution of i tokens, q_1:i = prod_j q_j(x_j) that of a drafter with independent positions
(prod_j q_j(x_j | x_j-1) with a Markov head).
"""

import torch
from torch import Tensor

from decoding.drafting.block_sampler import BlockSampler
from decoding.drafting.tree import ROOT, Tree, draft_trees
from decoding.engine.batch import Batch
from decoding.engine.params import SamplingParams
from decoding.engine.randomness import KeyedRandomness, Randomness
from decoding.engine.sampler import Sampler
from decoding.engine.verify import choose


def overlap(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Unbiased estimates of 1 - TV(p_1:i, q_1:i): min(1, p_1:i / q_1:i) of each draw from q.

    1 - TV = E_q[1 - (1 - p/q)^+] = E_q[min(1, p/q)].

    Args:
        log_p: Log-probability under p of each drawn token, conditioned on those before it, [N, k].
        log_q: The same under q, [N, k].

    Returns:
        [N, k], for i from 1 to k.

    >>> ratios = torch.tensor([[2.0, 0.25]])
    >>> overlap(ratios.log(), torch.zeros(1, 2)).tolist()  # the first surplus helps the second
    [[1.0, 0.5]]
    """
    return (log_p - log_q).cumsum(-1).clamp_max(0).exp()


def mean_of_others(p: Tensor, token: Tensor) -> Tensor:
    """The mean probability of each draw's token under the other draws' conditionals.

    It estimates the target's marginal. A draw's own conditional is left out, because it depends on
    the token's prefix.

    Args:
        p: The target's distribution at a position, conditioned on each of N of its draws, [N, V].
        token: The token that each draw has at the position, [N].

    Returns:
        Probabilities [N].

    >>> mean_of_others(torch.tensor([[1, 0], [0.5, 0.5]]), torch.tensor([0, 0])).tolist()
    [0.5, 1.0]
    """
    return p[:, token].fill_diagonal_(0).sum(0) / (len(p) - 1)


def copies(
    sampler: Sampler, prefix: list[int], params: SamplingParams, draws: int, randomness: Randomness
) -> Batch:
    """A batch of `draws` requests with the same prefix, which is prefilled once.

    Args:
        sampler: The sampler.
        prefix: Token ids.
        params: Of the requests.
        draws: N, the number of requests.
        randomness: Of the N rows.
    """
    device = sampler.device
    capacity = len(prefix) + params.max_new_tokens + sampler.margin(params)
    batch = Batch([prefix], capacity, KeyedRandomness([0], device), device)
    sampler.begin(batch, params)
    batch.select([0] * draws)
    batch.randomness = randomness
    return batch


def accepted(sampler: Sampler, batch: Batch, k: int, params: SamplingParams) -> Tensor:
    """Whether one cycle of the sampler accepts the first i drafted tokens: 0 or 1, [N, k]."""
    _, counts = sampler.cycle(batch, params)
    return (counts[:, None] - 1 > torch.arange(k, device=counts.device)).double()


def drafted_paths(sampler: Sampler, batch: Batch, k: int, params: SamplingParams) -> Tensor:
    """The `overlap` of target and drafter at paths that the drafter draws, [N, k]."""
    draft, q = sampler.draft_chain(batch, k, None, params)
    p = sampler.target_pass(batch, draft, params).logits[:, :-1].softmax(-1)
    return overlap(_log_chosen(p, draft), _log_chosen(q, draft))


def own_paths(sampler: Sampler, batch: Batch, k: int, params: SamplingParams) -> Tensor:
    """The `overlap` of the target and the product of its own marginals, [N, k].

    The drawn tokens are committed to the batch.

    sum_y min(p, m) = E_p[min(1, m/p)] at paths that the target draws, m_i(x_i) by `mean_of_others`.
    In expectation it is the overlap of a drafter that drafts each position from the mean of N - 1
    drawn conditionals. Such a drafter is one of those with independent positions, so the best of
    them reaches no less; N to infinity gives the product of the true marginals, which of all
    products has the least cross-entropy (but not surely the least TV).
    """
    log_p, log_m = [], []
    for _ in range(k):
        logits = sampler.target_pass(batch, batch.tokens[:, :0], params).logits
        p = logits[:, 0].softmax(-1)
        token = batch.randomness.categorical(p)
        log_p.append(_log_chosen(p, token))
        log_m.append(mean_of_others(p.double(), token).log())
        batch.append(token[:, None], torch.ones_like(batch.lengths))
    return overlap(torch.stack(log_m, 1), torch.stack(log_p, 1))


def own_trees(sampler: BlockSampler, batch: Batch, k: int, params: SamplingParams) -> Tensor:
    """Whether trees of the target's own marginals hold the first i tokens: 0 or 1, [N, k].

    The tokens are committed to the batch.

    Under `tree` the target's tokens are those that it chooses with the keyed noise, whatever is
    drafted, so no tree has to be verified. Each draw's tree is ranked with its noise by the mean of
    the others' conditionals (`own_paths`): that of a drafter without any error whose positions are
    independent. It is a simulation of one ranking, and no bound of all trees.

    Args:
        sampler: Gives the number of nodes, that of a batch of one.
        batch: N requests with the same prefix and noise of their own.
        k: Depth of the trees.
        params: How to decode, with verify='tree'.
    """
    noise, tokens, marginals = sampler.noise(batch, k, params), [], []
    for i in range(k):
        logits = sampler.target_pass(batch, batch.tokens[:, :0], params).logits
        p = logits[:, 0].softmax(-1)
        tokens.append(choose(logits, noise[:, i:]))
        others = p.sum(0, dtype=torch.double) - p
        marginals.append((others.clamp_min(0) / (len(p) - 1)).to(p.dtype))
        batch.append(tokens[-1], torch.ones_like(batch.lengths))
    ranked = torch.stack(marginals, 1).log() + noise[:, :k]
    trees = draft_trees(ranked, sampler.nodes[min(sampler.nodes)])
    paths = torch.cat(tokens, 1).tolist()
    depth = batch.lengths.new_tensor([_held(tree, path) for tree, path in zip(trees.rows, paths)])
    return (depth[:, None] > torch.arange(k, device=depth.device)).double()


def _held(tree: Tree, path: list[int]) -> int:
    """How many of a path's first tokens a tree holds."""
    at = ROOT
    for depth, token in enumerate(path):
        at = tree.child.get((at, token), ROOT)
        if at == ROOT:
            return depth
    return len(path)


def _log_chosen(probs: Tensor, tokens: Tensor) -> Tensor:
    return probs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1).double().log()
