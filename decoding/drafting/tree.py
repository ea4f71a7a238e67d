"""Draft trees: best-first prefixes under a product of marginals, verified in one target pass.

With a Markov head (`models.markov`) the product is of conditionals, as with a drafter that runs
again for each depth (`grow_trees`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from heapq import heappop, heappush
from math import exp, expm1, log, log1p
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from decoding.drafting.next_noise import NextNoise
from decoding.drafting.prompt_lookup import ORDER, Lookup, Suffix
from decoding.drafting.tree_limits import MAX_NODES
from decoding.engine.grammar import Constraint
from decoding.engine.verify import choose

ROOT = -1
UNSEEN: tuple[dict[int, float], float] = {}, 0.0  # what no lookup guesses
CANDIDATES = 20  # tokens of a depth whose scores may depend on the text or on bigrams

Ranked = tuple[list[int], list[float]]  # tokens, best first, and their log-probabilities
Path = tuple[int, ...]  # tokens from the root's child to a node
Children = Callable[[Path], Ranked]  # the ranked tokens after a path; none where it ends


class BigramScores(NamedTuple):
    """PMI scores of pairs of tokens (`decoding.drafting.bigrams`), with a weight for each depth.

    `after` maps a token u to the scores {v: score(u, v)} of the tokens seen after it.
    """

    after: Callable[[int], Mapping[int, float]]
    weight: list[float]


class Pairs(NamedTuple):
    """The additions to a depth's logits by the token before: scale * before[u] after[v]^T.

    Both matrices are [n, r]; scale is 1 / T where logits were divided by a temperature T.
    """

    before: Tensor
    after: Tensor
    scale: float = 1.0


class Tree(NamedTuple):
    """A tree of drafted tokens. Its root is the last committed token; parents precede children.

    Attributes:
        token: The token of each node.
        depth: The depth of each node; 1 for children of the root.
        path: The nodes from the root to each node, itself included, as a set of bits.
        child: {(parent, token): node}, with ROOT as the root's number.
        score: The log-probability of each node's path, where trees are ranked by it.
    """

    token: list[int]
    depth: list[int]
    path: list[int]
    child: dict[tuple[int, int], int]
    score: Sequence[float] = ()

    def count(self, least: float) -> int:
        """Return how many nodes have a probability of at least `least`."""
        return sum(exp(score) >= least for score in self.score)

    def first(self, nodes: int) -> "Tree":
        """Return the tree of the first so many nodes."""
        child = {edge: node for edge, node in self.child.items() if node < nodes}
        token, depth, path = (x[:nodes] for x in self[:3])
        return Tree(token, depth, path, child, self.score[:nodes])


def best_first(children: Children, nodes: int, least: float = 0.0, fewest: int = 1) -> Tree:
    """Make the tree of the `nodes` most probable prefixes; fewer where there are no more.

    A prefix is never more probable than a shorter prefix of itself, so nodes taken in the order of
    their probability form a tree. After the first `fewest` all have a probability of at least
    `least`.

    >>> depths = [([5, 6], [-0.1, -2.0]), ([7, 8], [-0.5, -0.9]), ([], [])]
    >>> best_first(lambda path: depths[len(path)], 3).token
    [5, 7, 8]
    """
    score: list[float] = []
    tree, root = Tree([], [], [], {}, score), ()
    tokens, scores = children(root)
    heap: list[tuple] = [(-scores[0], 0, 0, ROOT, 0.0, root, tokens, scores)]
    while heap and len(tree.token) < nodes:
        cost, depth, rank, parent, before, path, tokens, scores = heappop(heap)
        if len(tree.token) >= fewest and exp(-cost) < least:
            break
        node, token = len(tree.token), tokens[rank]
        tree.token.append(token)
        score.append(-cost)
        tree.depth.append(depth + 1)
        tree.path.append((tree.path[parent] if parent != ROOT else 0) | 1 << node)
        tree.child[parent, token] = node
        if rank + 1 < len(tokens):
            sibling = before - scores[rank + 1]
            heappush(heap, (sibling, depth, rank + 1, parent, before, path, tokens, scores))
        path = (*path, token)
        tokens, scores = children(path)
        if tokens:
            heappush(heap, (cost - scores[0], depth + 1, 0, node, cost, path, tokens, scores))
    return tree


def walk(tree: Tree, choice: list[int]) -> list[int]:
    """Return the accepted path: the nodes that the target's choices [N + 1] lead to."""
    at, path = ROOT, []
    while (at := tree.child.get((at, choice[at + 1]), ROOT)) != ROOT:
        path.append(at)
    return path


class Trees(NamedTuple):
    """The trees of a batch, of at most N nodes.

    Attributes:
        rows: The tree of each sequence.
        token: Token of each node, int64 [B, N]; smaller trees have padding, without children.
        depth: Depth of each node, int64 [B, N]; 1 for children of the root.
        path: Bits of the nodes on each node's path, int64 [B, N] (see `Tree`).
    """

    rows: list[Tree]
    token: Tensor
    depth: Tensor
    path: Tensor

    @property
    def sizes(self) -> Tensor:
        """Return how many nodes each tree has, [B]."""
        return self.token.new_tensor([len(row.token) for row in self.rows])

    def padding(self) -> Tensor | None:
        """Return where there is neither the root nor a node, [B, N + 1]; None: nowhere."""
        most = self.token.shape[1]
        if all(len(row.token) == most for row in self.rows):  # known here: a GPU need not be asked
            return None
        return torch.arange(most + 1, device=self.token.device) > self.sizes[:, None]

    def before(self) -> Tensor:
        """Return which nodes precede the token after the root or a node: 0 or 1, [B, N + 1, N]."""
        bit = torch.arange(self.path.shape[1], device=self.path.device)
        return pad(self.path, (1, 0))[:, :, None] >> bit & 1


def accepted_paths(trees: Trees, choice: Tensor) -> tuple[Tensor, Tensor]:
    """Return the accepted path of each tree: nodes int64 [B, m], and how many count [B].

    After a path's end the i-th entry is i. `choice` [B, N + 1] are the target's next tokens after
    the root and after each node.
    """
    return padded([walk(*row) for row in zip(trees.rows, choice.tolist())], choice)


def padded(paths: list[list[int]], like: Tensor) -> tuple[Tensor, Tensor]:
    """Return paths of nodes as tensors of the type and device of `like`; see `accepted_paths`."""
    count = [len(path) for path in paths]
    positions = range(max(count))
    node = [[*path, *positions[len(path) :]] for path in paths]
    return like.new_tensor(node).view(len(paths), -1), like.new_tensor(count)


class Accepted(NamedTuple):
    """The nodes and tokens that the target accepts of each tree of a batch.

    Attributes:
        tokens: The tokens along each accepted path and the target's own after it, int64 [B, m + 1].
        count: Drafted tokens that are accepted, [B]: one more token is emitted.
        node: The i-th node of each path, int64 [B, m]; after a path's end, i itself.
        along: The root (0) and the nodes (from 1) of each path, int64 [B, m + 1].
    """

    tokens: Tensor
    count: Tensor
    node: Tensor
    along: Tensor


def verify_trees(trees: Trees, logits: Tensor, noise: Tensor | None) -> Accepted:
    """Verify trees (`verify=tree`): the target follows its own choices, with its keyed noise.

    Its choice after every prefix is argmax(log p + g), with the noise g of the position, so the
    output is plain decoding's text with that seed, for any trees.

    Args:
        logits: The target's warped logits after the root and after each node, [B, N + 1, V].
        noise: Keyed noise of the next positions, [B, k + 1, V]; None at temperature 0.
    """
    choice = choose(logits, noise, pad(trees.depth, (1, 0)))
    node, count = accepted_paths(trees, choice)
    along = pad(node + 1, (1, 0))
    return Accepted(choice.gather(1, along), count, node, along)


def draft_trees(
    logits: Tensor,
    nodes: int,
    sharpness: float | Tensor = 1.0,
    bigrams: BigramScores | None = None,
    lookups: list[Lookup] | None = None,
    pairs: Pairs | None = None,
    ids: Tensor | None = None,
    least: float = 0.0,
    constraints: Sequence[Constraint | None] | None = None,
    ragged: bool = False,
) -> Trees:
    """Draft best-first trees under softmax(sharpness * (logits + pairs' terms) + bigram scores).

    With bigram scores or lookups only each depth's CANDIDATES most probable tokens, and the tokens
    that a lookup guesses, can become nodes; with `pairs`, the tokens of `likeliest_paths`, 4 + N /
    8 a depth for N nodes: with 16 nodes no fewer drafts were accepted than with 16 tokens a depth,
    and each token kept costs the terms of a whole vocabulary.

    Args:
        logits: The drafter's logits, with the noise added if there is any, [B, k, n].
        nodes: The most nodes of a tree.
        sharpness: Inverse temperature of the drafter: a number, or one for each depth [k] or
            longer. Below 1 it corrects an overconfident drafter, whose trees would be too deep and
            narrow.
        bigrams: Scores that depths 2 to k add, by the token before.
        lookups: The text of each sequence, mixed into the ranking (`prompt_lookup`).
        pairs: The terms that depths 2 to k add, by the token before.
        ids: [n], the token of each logit; None: token i.
        least, ragged: The least probability of a node; see `trees_of`.
        constraints: What the answer of each sequence may be (`engine.grammar`).
    """
    logits = logits[:, :nodes]  # a tree is no deeper
    if isinstance(sharpness, Tensor):
        sharpness = sharpness[: logits.shape[1], None]
    logits = sharpness * logits
    marginals = logits.log_softmax(-1)
    if pairs is None:
        count = nodes if bigrams is None and lookups is None else CANDIDATES
        scores, chosen = marginals.topk(min(count, logits.shape[-1]))
        conditionals: list[list | None] = [None] * len(marginals)
    else:
        count = min(4 + nodes // 8, logits.shape[-1])
        chosen, after = likeliest_paths(logits, count, pairs, sharpness)
        scores, conditionals = marginals.gather(-1, chosen), after.tolist()
    tokens = (chosen if ids is None else ids[chosen]).tolist()
    texts: Sequence[Lookup | None] = lookups or [None] * len(marginals)
    rankings = [
        child_ranking([*zip(*row)], bigrams, lookup, after)
        for *row, lookup, after in zip(tokens, scores.tolist(), texts, conditionals)
    ]
    if constraints is not None:
        rankings = [constrained(*of, logits.shape[1]) for of in zip(rankings, constraints)]
    return trees_of(rankings, nodes, least, logits.device, ragged=ragged)


def trees_of(
    rankings: list[Children],
    nodes: int,
    least: float,
    device: torch.device,
    fewest: int = 1,
    ragged: bool = False,
) -> Trees:
    """Return the best trees of a batch, of nodes with a probability of at least `least`.

    A tree has at least `fewest` nodes. Where a node more is a token more of every sequence the
    trees have one size, and the probability is an average over the sequences; `ragged` trees have
    sizes of their own.
    """
    alone = least if ragged or len(rankings) == 1 else 0.0
    rows = [best_first(children, nodes, alone, fewest) for children in rankings]
    if ragged:
        return batched([row.first(max(fewest, row.count(least))) for row in rows], device)
    size = min(len(row.token) for row in rows)
    if least:
        chances = [sum(map(exp, scores)) for scores in zip(*(row.score[:size] for row in rows))]
        size = max(fewest, sum(chance >= least * len(rows) for chance in chances))
    return batched([row.first(size) for row in rows], device)


def grow_trees(
    expand: Callable[[int, Tensor | None, Tensor | None], Tensor],
    k: int,
    nodes: int,
    sharpness: float | Tensor = 1.0,
    bigrams: BigramScores | None = None,
    lookups: list[Lookup] | None = None,
    ids: Tensor | None = None,
    least: float = 0.0,
    least_gain: float = 0.0,
    fewest: int = 1,
    constraints: Sequence[Constraint | None] | None = None,
    ragged: bool = False,
    noise: Tensor | None = None,
) -> Trees:
    """Draft best-first trees of conditional drafts, all nodes of a depth in one run of the drafter.

    Only nodes among the best of the tree so far are expanded, at most MAX_NODES in all: as children
    are never more probable than their parent, few others will be among them later.

    Args:
        expand: Returns the drafter's logits [B, M, n] after M nodes of a depth: `expand(depth,
            tokens, parent)`, [B, M] each as in `BlockDrafter.extend`; those after the root, M = 1,
            for depth 0 and None.
        k: The most tokens of a path that the drafter drafts.
        nodes, sharpness, bigrams, lookups, ids, least, constraints, ragged: See `draft_trees`.
        least_gain: Tokens that a further run is expected to bring a tree of the batch, at the
            least (`expected_gain`); 0: trees grow wherever they have nodes.
        fewest: Nodes of a tree that need no least probability; see `trees_of`.
        noise: The target's keyed noise at the next positions, [B, k + 1, V], if it ranks too.
    """
    logits = expand(0, None, None)
    device = logits.device
    texts: Sequence[Lookup | None] = lookups or [None] * len(logits)
    count = min(nodes if bigrams is None and lookups is None else CANDIDATES, logits.shape[-1])
    limits = constraints or [None] * len(logits)
    drawn = [None] * len(logits) if noise is None else map(NextNoise, noise)
    rows = [Growing(bigrams, *of, k) for of in zip(texts, limits, drawn)]
    growing: list[list[Path]] = [[()] for _ in rows]
    given = 0
    for depth in range(k):
        sharp = sharpness[depth] if isinstance(sharpness, Tensor) else sharpness
        g = None if noise is None else noise[:, depth, None]
        if g is not None:
            g = sharp * (g if ids is None else g[..., ids])
        for row, paths, found in zip(rows, growing, likeliest(sharp * logits, g, ids, count)):
            for path, drafted in zip(paths, found):
                row.add(path, drafted)
        if depth + 1 == k:
            break
        best = [row.best(nodes, least, fewest) for row in rows]
        leaves = [row.growing(found, depth + 1) for row, found in zip(rows, best)]
        growing = [paths[: MAX_NODES - given] for paths in leaves]
        if not (M := max(map(len, growing))):
            break
        gains = [expected_gain(paths, depth + 1, nodes, least) for paths in best]
        if least_gain and sum(gains) / len(gains) < least_gain:
            break
        last = [[path[-1] for path in paths] + [0] * (M - len(paths)) for paths in growing]
        parents = [row.number(paths, M, given) for row, paths in zip(rows, growing)]
        given += M
        logits = expand(depth + 1, *torch.tensor([last, parents], device=device))
    return trees_of([row.children for row in rows], nodes, least, device, fewest, ragged)


class Drafted(NamedTuple):
    """A drafter's likeliest tokens after a path.

    Attributes:
        ranked: With the scores that rank them.
        own: log q of each.
        total: log of the sum of q e^g, with the noise g where it ranks too.
    """

    ranked: Ranked
    own: dict[int, float]
    total: float


def likeliest(
    logits: Tensor, noise: Tensor | None, ids: Tensor | None, count: int
) -> list[list[Drafted]]:
    """Return the likeliest tokens of logits [B, M, n], with noise [B, 1, n] if it ranks too.

    `ids` [n] are their tokens; None: token i.
    """
    own = logits.log_softmax(-1)
    drawn, total = own, own.new_zeros(own.shape[:-1])
    if noise is not None:
        drawn = own + noise
        total = drawn.logsumexp(-1)
    best, chosen = drawn.topk(count)
    tokens = chosen if ids is None else ids[chosen]
    columns = tokens, best - total[..., None], own.gather(-1, chosen), total
    rows = zip(*(column.tolist() for column in columns))
    return [[Drafted((v, s), dict(zip(v, q)), z) for v, s, q, z in zip(*row)] for row in rows]


def expected_gain(paths: dict[Path, float], depth: int, nodes: int, least: float) -> float:
    """Return how many tokens a tree is expected to gain by the children of its deepest nodes.

    The target reaches those nodes with probability R, and their parents with R'. The children are
    expected to add R / R' of R. There are about as many of them as parents: each costs `least`, and
    takes the place of the least probable node where the tree is full.

    Args:
        paths: The paths of the tree and their probabilities (`Growing.best`).
        depth: The most tokens of a path.
        nodes, least: See `draft_trees`.
    """
    before, deepest = (
        [p for path, p in paths.items() if len(path) == n] for n in (depth - 1, depth)
    )
    if not deepest:
        return 0.0
    price = least if len(paths) <= nodes else max(least, min(paths.values()))
    return sum(deepest) ** 2 / sum(before) - len(deepest) * price


class Growing:
    """The drafts of one sequence, of which the drafter has expanded some nodes.

    Args:
        bigrams, lookup, constraint: See `draft_trees`.
        noise: That of the next positions, if it ranks too.
        depth: See `constrained`.
    """

    def __init__(
        self,
        bigrams: BigramScores | None,
        lookup: Lookup | None,
        constraint: Constraint | None,
        noise: NextNoise | None,
        depth: int,
    ):
        self._bigrams, self._lookup, self._noise = bigrams, lookup, noise
        self.children = constrained(self._children, constraint, depth)
        self._ranked: dict[Path, Ranked] = {}
        self._number: dict[Path, int] = {(): ROOT}

    def add(self, path: Path, drafted: Drafted) -> None:
        """Add the drafter's tokens after a path."""
        self._ranked[path] = self._mixed(path, drafted)

    def _children(self, path: Path) -> Ranked:
        """Return the tokens after a path; where it is not expanded the lookup's guesses alone."""
        if path not in self._ranked:
            self._ranked[path] = self._mixed(path, None)
        return self._ranked[path]

    def _mixed(self, path: Path, drafted: Drafted | None) -> Ranked:
        ranked, own, total = drafted or (([], []), None, None)
        lookup, depth, suffix = self._lookup, len(path), suffix_of(self._lookup, path)
        if lookup is None or (self._noise and depth >= self._noise.most):
            return mixed(ranked, depth, suffix, self._bigrams, *UNSEEN)
        guesses, weight = lookup.guesses(suffix, own)
        if self._noise and guesses:
            guesses, weight = self._noise.weighed(depth, guesses, weight, total)
        return mixed(ranked, depth, suffix, self._bigrams, guesses, weight)

    def best(self, nodes: int, least: float, fewest: int) -> dict[Path, float]:
        """Return the paths of the best tree so far, best first, and their probabilities."""
        paths: list[Path] = []
        found: dict[Path, float] = {(): 1.0}
        tree = best_first(self.children, nodes, least, fewest)
        for (before, token), score in zip(tree.child, tree.score):
            parent = paths[before] if before != ROOT else ()
            paths.append((*parent, token))
            found[paths[-1]] = exp(score)
        return found

    def growing(self, paths: Iterable[Path], depth: int) -> list[Path]:
        """Return those paths of a depth after whose parent the drafter was run."""
        return [path for path in paths if len(path) == depth and path[:-1] in self._number]

    def number(self, paths: list[Path], count: int, first: int) -> list[int]:
        """Number nodes from `first` on; return their parents', with padding to `count` nodes."""
        self._number |= {path: first + i for i, path in enumerate(paths)}
        parents = [self._number[path[:-1]] for path in paths]
        return parents + [ROOT] * (count - len(paths))


def batched(rows: list[Tree], device: torch.device) -> Trees:
    """Batch trees, the smaller ones with padding: nodes at depth 1 that no path leads through."""
    size = max(len(row.token) for row in rows)
    padding = [0] * size, [1] * size, [1 << node for node in range(size)]
    whole = [[own + more[len(own) :] for own, more in zip(row[:3], padding)] for row in rows]
    return Trees(rows, *torch.tensor([*zip(*whole)], dtype=torch.long, device=device))


def likeliest_paths(
    logits: Tensor, count: int, pairs: Pairs, sharpness: float | Tensor = 1.0
) -> tuple[Tensor, Tensor]:
    """Return the tokens of each depth that the most probable paths lead to (Viterbi).

    S_1(v) = log q_1(v) and S_i(v) = max_u [S_{i-1}(u) + log q_i(v | u)] are the log-probabilities
    of the best paths that end in v. A tree of N nodes has only the N best tokens of each depth, so
    with `count` = N nothing is left out.

    Args:
        logits: l_i times the sharpness, [B, k, n].
        count: C, the tokens that are kept of each depth.
        pairs: The terms of n tokens: q_i(. | u) is softmax(l_i + sharpness * terms after u).
        sharpness: A number, or one for each depth, [k, 1].

    Returns:
        Tokens: Indices of the logits, int64 [B, k, C]; the first depth's are best first.
        conditionals: log q_i(v | u) of a depth's tokens v after each u before, [B, k - 1, C, C].
    """
    best, chosen = logits[:, 0].log_softmax(-1).topk(count)
    tokens, conditionals = [chosen], [best.new_empty(len(best), 0, count, count)]
    after = pairs.after.to(logits.dtype).T
    for i in range(1, logits.shape[1]):
        sharp = sharpness[i] if isinstance(sharpness, Tensor) else sharpness
        before = sharp * pairs.scale * pairs.before[chosen].to(logits.dtype)
        q = (logits[:, i, None] + before @ after).log_softmax(-1)
        best, chosen = (best[..., None] + q).amax(1).topk(count)
        conditionals.append(q.gather(-1, chosen[:, None].expand(-1, count, -1))[:, None])
        tokens.append(chosen)
    return torch.stack(tokens, 1), torch.cat(conditionals, 1)


def child_ranking(
    depths: list[Ranked],
    bigrams: BigramScores | None = None,
    lookup: Lookup | None = None,
    conditionals: list[list[list[float]]] | None = None,
) -> Children:
    """Make the function `children` of `best_first` for one sequence.

    After the last depth the lookup's guesses are the only children. `conditionals`, by depth,
    parent and token (`likeliest_paths`), replace the log-probabilities of `depths` from the second
    on; without them `depths` are best first.
    """
    if conditionals:
        indices = [{token: i for i, token in enumerate(tokens)} for tokens, _ in depths]

    @cache
    def ranked(depth: int, suffix: Suffix) -> Ranked:
        at = depths[depth] if depth < len(depths) else ([], [])
        if conditionals and 0 < depth < len(depths):
            parent = indices[depth - 1].get(suffix[-1])  # a lookup's guess may be no candidate
            at = sort(at[0], at[1] if parent is None else conditionals[depth - 1][parent])
        return mixed(at, depth, suffix, bigrams, *(lookup.guesses(suffix) if lookup else UNSEEN))

    return lambda path: ranked(len(path), suffix_of(lookup, path))


def constrained(children: Children, constraint: Constraint | None, depth: int) -> Children:
    """Make the function of the children that a constraint allows.

    In a path of less than `depth` tokens a token that must follow is a child, whoever drafts it.
    """
    if constraint is None:
        return children
    return lambda path: constraint.ranked(path, children(path), forced=len(path) < depth)


def suffix_of(lookup: Lookup | None, path: Path) -> Suffix:
    """Return the last tokens of a text that a path goes on."""
    return ((lookup.suffix if lookup else ()) + path)[-ORDER:]


def mixed(
    ranked: Ranked,
    depth: int,
    suffix: Suffix,
    bigrams: BigramScores | None,
    guesses: Mapping[int, float],
    weight: float,
) -> Ranked:
    """Return a depth's ranked tokens with bigram scores and a lookup's guesses, best first.

    Tokens that are not ranked keep their scores, so the distribution with bigram scores is
    normalised by 1 + sum over the others of p (e^(weight score) - 1).
    """
    tokens, marginal = ranked
    scores, known = marginal, bigrams.after(suffix[-1]) if bigrams and depth else {}
    if not known and not weight:
        return ranked
    index = {token: i for i, token in enumerate(tokens)}
    if bigrams and (both := known.keys() & index.keys()):
        added = {index[v]: bigrams.weight[depth] * known[v] for v in both}
        total = log1p(sum(exp(marginal[i]) * expm1(x) for i, x in added.items()))
        scores = [x - total for x in marginal]
        for i, x in added.items():
            scores[i] += x
    if weight:
        scores = [x + log1p(-weight) for x in scores]
        others = [token for token in guesses if token not in index]
        for token in guesses.keys() & index.keys():
            scores[index[token]] = log(exp(scores[index[token]]) + weight * guesses[token])
        tokens, scores = [*tokens, *others], [*scores, *(log(weight * guesses[v]) for v in others)]
    return ranked if scores is marginal else sort(tokens, scores)


def sort(tokens: list[int], scores: list[float]) -> Ranked:
    """Sort tokens by their scores, best first."""
    order = sorted(range(len(tokens)), key=scores.__getitem__, reverse=True)
    return [tokens[i] for i in order], [scores[i] for i in order]
