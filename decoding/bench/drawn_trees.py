"""Draft trees drawn from the drafter, and two published rules that verify them by sampling.

They are baselines of `verify=tree`, for benches. Each is exact if every node's token is drawn from
the q that verifies it, conditioned on everything the verification has looked at before. Therefore

- a tree's shape is fixed before a token is drawn;
- children of different nodes are drawn independently: siblings at one depth that share a draw, as
  in a noise-ranked tree, would carry information about each other;
- verification uses its own draws, which the drafter does not know.

Symbols: B sequences, N nodes of each tree, V tokens. Nodes are numbered from 1; 0 is the root, the
last committed token. p [B, N + 1, V] are the target's distributions after the root and after each
node, and q [B, N + 1, V] the distributions that its first child was drawn from.
"""

import copy
from collections.abc import Callable
from math import log, log1p
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from decoding.bench.options import DRAWN
from decoding.drafting.block_drafter import BlockDrafter
from decoding.drafting.block_sampler import BlockSampler
from decoding.drafting.chain import Chain
from decoding.drafting.ranked_tree import accept, tree_pass
from decoding.drafting.tree import Accepted, Tree, Trees, batched, best_first, padded
from decoding.engine.batch import Batch
from decoding.engine.params import SamplingParams
from decoding.engine.randomness import Randomness
from decoding.engine.verify import block
from models import masks

ACCEPT = 0.8  # of `equally_likely`


class DrawnTrees(NamedTuple):
    """Draft trees with drawn tokens, the parent of each node, int64 [B, N], and q as above."""

    trees: Trees
    parent: Tensor
    q: Tensor


def chains(paths: int, length: int) -> Tree:
    """Return the shape of K = `paths` paths without common nodes, path i from node i * length on.

    >>> chains(2, 3).depth, [f"{path:b}" for path in chains(2, 3).path]
    ([1, 2, 3, 1, 2, 3], ['1', '11', '111', '1000', '11000', '111000'])
    """
    depth = [*range(1, length + 1)] * paths
    path = [((1 << d) - 1) << i * length for i in range(paths) for d in range(1, length + 1)]
    parent = [node - 1 if d > 1 else -1 for node, d in enumerate(depth)]
    child = {(before, node): node for node, before in enumerate(parent)}
    return Tree([0] * len(depth), depth, path, child)


def equally_likely(nodes: int, depth: int, siblings: int, accept: float = ACCEPT) -> Tree:
    """Return the shape with most accepted nodes if all draws are accepted with equal probability.

    The i-th sibling is then accepted with probability accept (1 - accept)^(i-1), whatever its
    parent. Sequoia (arXiv 2402.12374) does the same with measured probabilities. `depth` bounds the
    nodes of a path and `siblings` the children of a node.

    >>> equally_likely(4, 3, 9, accept=0.8).depth, equally_likely(4, 3, 9, accept=0.3).depth
    ([1, 2, 3, 1], [1, 1, 1, 1])
    """
    ranks = [*range(min(nodes, siblings))]
    ranked = ranks, [log(accept) + i * log1p(-accept) for i in ranks]
    return best_first(lambda path: ranked if len(path) < depth else ([], []), nodes)


def draw_trees(
    shape: Tree,
    first: Tensor,
    following: Callable[[Tensor, Tensor], Tensor],
    randomness: Randomness,
    distinct: bool,
) -> DrawnTrees:
    """Draw the tokens of trees of a given shape, node by node, parents first.

    A node whose siblings have used up all tokens with positive q is token 0, and is never accepted.
    The root's children are drawn from `first` [B, V], and other nodes from what `following` returns
    for depths and tokens of their parents, [B] each. `distinct` draws siblings without replacement.
    """
    trees = batched([shape] * len(first), first.device)
    parent = torch.tensor([before + 1 for before, _ in shape.child], device=first.device)
    parent = parent.expand(len(first), -1)
    rows, nodes = parent.shape
    row = torch.arange(rows, device=first.device)
    q = first.new_zeros(rows, nodes + 1, first.shape[-1])
    q[:, 0] = first
    left, token = q.clone(), torch.zeros_like(trees.token)
    for n in range(nodes):
        of = left[row, parent[:, n]]
        spent = of.sum(-1, keepdim=True) == 0
        certain = torch.zeros_like(of).index_fill_(-1, parent.new_tensor([0]), 1.0)
        token[:, n] = randomness.categorical(torch.where(spent, certain, of))
        if distinct:
            left[row, parent[:, n]] = without(of, token[:, n])
        q[:, n + 1] = left[:, n + 1] = following(trees.depth[:, n], token[:, n])
    return DrawnTrees(trees._replace(token=token), parent, q)


def without(q: Tensor, token: Tensor) -> Tensor:
    """Return q [B, V] conditioned on not being `token` [B]; zeros if no other is possible."""
    rest = q.scatter(-1, token[:, None], 0.0)
    total = rest.sum(-1, keepdim=True)
    return torch.where(total > 0, rest / total, 0.0)


def traversal(drawn: DrawnTrees, p: Tensor, randomness: Randomness) -> Accepted:
    """Verify trees of distinct siblings by whole prefixes, leaves first (`traversal`).

    Source: Weng et al., arXiv 2505.12398. A node x with parent u has the weight
    r_x = min(1, r_u p_u(x) / q_u(x)), r = 1 at the root. Nodes are visited after their descendants;
    x is accepted with its weight, and its whole prefix with it. Otherwise its parent goes on with

        p_u <- (r_u p_u - q_u)+ / s,   r_u <- s / (s + 1 - r_u),   s = sum (r_u p_u - q_u)+,

    and q_u without x. A path without siblings is verified as by `block`. An update of u depends
    neither on which child was rejected nor on its subtree, so all weights are known before any
    random draw, and one draw selects the first accepted node.
    """
    row = torch.arange(len(p), device=p.device)
    p, q, r = p.clone(), drawn.q.clone(), torch.ones_like(p[..., 0])
    for n, (u, x) in enumerate(zip(drawn.parent.unbind(1), drawn.trees.token.unbind(1)), 1):
        p_u, q_u, r_u = p[row, u], q[row, u], r[row, u]
        drawable = q_u[row, x] > 0  # otherwise its siblings have used up q: see `draw_trees`
        ratio = r_u * p_u[row, x] / q_u[row, x]
        r[:, n] = torch.where(drawable, ratio.clamp_max(1), 0.0)
        p_rest, r_rest = after_rejection(p_u, q_u, r_u)
        p[row, u] = torch.where(drawable[:, None], p_rest, p_u)
        q[row, u] = torch.where(drawable[:, None], without(q_u, x), q_u)
        r[row, u] = torch.where(drawable, r_rest, r_u)
    order = drawn.parent.new_tensor([leaves_first(parents) for parents in drawn.parent.tolist()])
    accept = r.gather(1, order)
    none_before = pad((1 - accept[:, :-1]).cumprod(1), (1, 0), value=1.0)
    node = order[row, randomness.categorical(accept * none_before)]
    return _accepted(drawn.trees, node, randomness.categorical(p[row, node]))


def after_rejection(p: Tensor, q: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return p [B, V] and weight [B] of a node after a child drawn from q was rejected.

    They are (r p - q)+ normalised, and s / (s + 1 - r) for the weight r before (`traversal`).
    """
    rest = (weight[:, None] * p - q).clamp_min(0)
    s = rest.sum(-1)
    left = s + 1 - weight
    # Where r = 1 and p = q there is no mass either way: the child was surely accepted.
    weight = torch.where(left > 0, s / left, weight)
    return torch.where(s[:, None] > 0, rest / s[:, None], p), weight


def leaves_first(parents: list[int]) -> list[int]:
    """Order a tree's nodes, given the parents of nodes 1, 2, ..., so that descendants come first.

    >>> leaves_first([0, 1, 1, 0])
    [2, 3, 1, 4, 0]
    """
    children: list[list[int]] = [[] for _ in range(len(parents) + 1)]
    for node, parent in enumerate(parents, 1):
        children[parent].append(node)

    def subtree(node: int) -> list[int]:
        return [*(below for child in children[node] for below in subtree(child)), node]

    return subtree(0)


def multipath(drawn: DrawnTrees, p: Tensor, randomness: Randomness) -> Accepted:
    """Verify trees of the shape `chains`: select the best path, and verify it with `block`.

    Source: greedy multi-path block verification, Thomas and Pal, arXiv 2602.16961: a rule selects
    one of K i.i.d. paths, and `block` verifies it with the distribution of the selected path. Here
    the rule takes the path whose first token is the first in the order `by_ratio`, among those with
    the same first token the one whose second is, and so on. We know the paper only from summaries,
    which do not tell its order; any strict order is exact.

    With w the probability under q of a prefix, and G that of the paths preferred to all with this
    prefix, the selected path begins with it with probability
    (1 - G)^K - (1 - G - w)^K = w S(1 - G, 1 - G - w), where S is `difference`.
    """
    length = int(drawn.trees.depth.max())
    tokens = drawn.trees.token.unflatten(1, (-1, length))  # [B, K, length]
    rows, paths, _ = tokens.shape
    row = torch.arange(rows, device=p.device)

    at, best = torch.zeros_like(row), torch.ones_like(tokens[..., 0], dtype=torch.bool)
    preferred, weight = p.new_zeros(rows, 1).double(), p.new_ones(rows, 1).double()
    along, draft, q = [at], [], []
    for i in range(length):
        p_i, q_i = p[row, at].double(), drawn.q[row, at].double()
        order = by_ratio(p_i, q_i)
        ranked = q_i.gather(1, order)
        before = torch.zeros_like(q_i).scatter(1, order, ranked.cumsum(1) - ranked)
        above, mass = preferred + weight * before, weight * q_i
        of_all = difference(1 - preferred, 1 - preferred - weight, paths)
        q.append(q_i * difference(1 - above, 1 - above - mass, paths) / of_all)
        rank = order.argsort().gather(1, tokens[..., i]).masked_fill(~best, order.shape[1])
        best = rank == rank.amin(1, keepdim=True)
        path = best.int().argmax(1)
        at = path * length + i + 1
        draft.append(tokens[row, path, i])
        preferred, weight = (x.gather(1, draft[-1][:, None]) for x in (above, mass))
        along.append(at)
    draft, q, along = (torch.stack(x, 1) for x in (draft, q, along))
    accepted, following = block(draft, q, p[row[:, None], along], randomness)
    return _accepted(drawn.trees, along[row, accepted], following)


def by_ratio(p: Tensor, q: Tensor) -> Tensor:
    """Return tokens, int64 [B, V], by falling p/q, ties by number, those with q = 0 last."""
    return torch.where(q > 0, p / q, -1.0).argsort(descending=True, stable=True)


def difference(a: Tensor, b: Tensor, exponent: int) -> Tensor:
    """Compute (a^K - b^K) / (a - b) = sum_j a^j b^(K-1-j), K = exponent, without cancellation."""
    b = b.clamp_min(0)  # it is a probability, up to rounding
    return sum(a**j * b ** (exponent - 1 - j) for j in range(exponent))


def _accepted(trees: Trees, node: Tensor, following: Tensor) -> Accepted:
    """Return the path to each accepted node [B], by number, and the token [B] that follows it."""
    bits = pad(trees.path, (1, 0)).gather(1, node[:, None]).flatten().tolist()
    paths = [[i for i in range(path.bit_length()) if path >> i & 1] for path in bits]
    nodes, count = padded(paths, node)
    tokens = torch.cat([trees.token.gather(1, nodes), following[:, None]], 1)
    tokens.scatter_(1, count[:, None], following[:, None])
    return Accepted(tokens, count, nodes, pad(nodes + 1, (1, 0)))


RULES = dict(zip(DRAWN, (traversal, multipath)))


class DrawnTree(Chain):
    """Drafts and verifies trees drawn from the drafter; at temperature 0 a chain.

    With k = `block_size`, the rule `traversal` takes a tree of `nodes` nodes with paths of up to k
    tokens, and `multipath` as many separate paths of k tokens as `nodes` allows.
    """

    predicate = staticmethod(masks.tree)

    def __init__(self, block_size: int, nodes: int, rule: str):
        super().__init__(block_size)
        self.nodes, self.rule = nodes, rule

    def most(self, params: SamplingParams) -> int:
        return max(super().most(params), self.nodes)

    def cycle(
        self, sampler: BlockDrafter, batch: Batch, params: SamplingParams
    ) -> tuple[Tensor, Tensor]:
        if params.temperature == 0:
            return super().cycle(sampler, batch, params)
        drawn = self.draw(sampler, batch, params)
        output = tree_pass(sampler, batch, drawn.trees, params)
        p = output.logits.softmax(-1)
        return accept(sampler, batch, output, RULES[self.rule](drawn, p, batch.randomness))

    def draw(self, sampler: BlockDrafter, batch: Batch, params: SamplingParams) -> DrawnTrees:
        """Draw the tokens of trees of a fixed shape."""
        k = params.block_size or self.block_size
        logits = sampler.block_logits(batch, k)
        q = sampler.warped_draft(logits, batch, params).softmax(-1)
        row = torch.arange(len(q), device=q.device)

        def following(depth: Tensor, token: Tensor) -> Tensor:
            depth = depth.clamp_max(k - 1)  # the last depth has no children
            if sampler.markov is None:
                return q[row, depth]
            at = logits[row, depth] + sampler.markov.following(token)
            return sampler.warped_draft(at[:, None], batch, params)[:, 0].softmax(-1)

        distinct = self.rule == "traversal"
        if distinct:
            shape = equally_likely(self.nodes, k, sampler.vocabulary)
        else:
            length = min(k, self.nodes)
            shape = chains(self.nodes // length, length)
        return draw_trees(shape, q[:, 0], following, batch.randomness, distinct)


def drawing(sampler: BlockSampler, rule: str) -> BlockSampler:
    """Return a copy of a block drafter's sampler that draws trees when verify=rejection.

    They have as many nodes as its own tree, and `rule`, one of RULES, verifies them. A drafter with
    a tail, and a sampler without a drafter, raise ValueError.
    """
    if "rejection" not in sampler.rules:
        raise ValueError(
            f"drawn=[{rule}] is not allowed: this sampler verifies only with {list(sampler.rules)}"
        )
    if sampler.tail:
        raise ValueError(
            f"drawn=[{rule}] is not allowed: it needs the distributions of all positions at once, "
            "and this drafter gives them token by token"
        )
    changed, nodes = copy.copy(sampler), sampler.tree.nodes
    changed.chain = DrawnTree(sampler.block_size, nodes[min(nodes)], rule)
    return changed
