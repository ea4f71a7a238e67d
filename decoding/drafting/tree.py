"""Draft trees: the likeliest continuations under independent marginals, for one pass to verify."""

from collections.abc import Callable, Mapping
from functools import cache
from heapq import heappop, heappush
from math import exp, expm1, log, log1p
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from decoding.drafting.prompt_lookup import Last, Lookup, then

ROOT = -1
LIMIT = 63  # nodes: a path is a set of nodes, one bit each
CHOICES = 20  # tokens of a depth that may know what stands before them

Ranked = tuple[list[int], list[float]]  # tokens, best first, and logarithms of their probabilities


class Lift(NamedTuple):
    """What the token before is to those behind it, see `draft_trees`.

    behind: what a token u lifts, {v: lift(u, v)}; weight [k]: how much each depth heeds it.
    """

    behind: Callable[[int], Mapping[int, float]]
    weight: list[float]


class Tree(NamedTuple):
    """A tree of tokens behind the last committed one, the root. Parents come before children.

    token, depth (1 at the root's children), path (bits of the nodes from the root to this one):
    of each node. child: {(parent, token): node}.
    """

    token: list[int]
    depth: list[int]
    path: list[int]
    child: dict[tuple[int, int], int]


def best_first(children: Callable[[int, Last], Ranked], nodes: int, last: Last = ()) -> Tree:
    """The `nodes` likeliest prefixes behind a text that ends with the tokens `last`.

    children(depth, last): what may stand at a depth (0: the first) behind a text and a prefix that
    end so; nothing if a prefix is no longer. A prefix is never likelier than a shorter one of
    itself, so nodes taken in the order of their probability form a tree.

    >>> depths = [([5, 6], [-0.1, -2.0]), ([7, 8], [-0.5, -0.9]), ([], [])]
    >>> best_first(lambda depth, last: depths[depth], 3).token
    [5, 7, 8]
    """
    tree = Tree([], [], [], {})
    tokens, scores = children(0, last)
    heap = [(-scores[0], 0, 0, ROOT, 0.0, last, tokens, scores)]
    while heap and len(tree.token) < nodes:
        cost, depth, rank, parent, before, last, tokens, scores = heappop(heap)
        node, token = len(tree.token), tokens[rank]
        tree.token.append(token)
        tree.depth.append(depth + 1)
        tree.path.append((tree.path[parent] if parent != ROOT else 0) | 1 << node)
        tree.child[parent, token] = node
        if rank + 1 < len(tokens):
            sibling = before - scores[rank + 1]
            heappush(heap, (sibling, depth, rank + 1, parent, before, last, tokens, scores))
        last = then(last, token)
        tokens, scores = children(depth + 1, last)
        if tokens:
            heappush(heap, (cost - scores[0], depth + 1, 0, node, cost, last, tokens, scores))
    return tree


def walk(tree: Tree, choice: list[int]) -> list[int]:
    """The nodes that the choices lead through. choice [nodes + 1]: at the root, at each node."""
    at, path = ROOT, []
    while (at := tree.child.get((at, choice[at + 1]), ROOT)) != ROOT:
        path.append(at)
    return path


class Trees(NamedTuple):
    """The trees of a batch, of N nodes each. token, depth, path [B, N], see `Tree`."""

    rows: list[Tree]
    token: Tensor
    depth: Tensor
    path: Tensor

    def before(self) -> Tensor:
        """Which nodes stand before the token that follows the root or a node: [B, N + 1, N]."""
        bit = torch.arange(self.path.shape[1], device=self.path.device)
        return pad(self.path, (1, 0))[:, :, None] >> bit & 1


def check_tree(nodes: int, sharpness: float | dict[str, list[float]]) -> None:
    """ValueError for a tree that cannot be. sharpness: a number, or one a depth by temperature."""
    if not 1 <= nodes <= LIMIT:
        raise ValueError(f"nodes={nodes} is not allowed: it must be from 1 to {LIMIT}")
    depths = sharpness.values() if isinstance(sharpness, dict) else [[sharpness]]
    if not depths or min(map(min, depths)) <= 0:
        raise ValueError(f"sharpness={sharpness} is not allowed: it must be above 0")


def followed(trees: Trees, choice: Tensor) -> tuple[Tensor, Tensor]:
    """The paths that choices [B, N + 1] (at the root, at each node) lead along.

    Returns node [B, m], the i-th node of each row's path, and count [B], how long a path is; where
    it has ended, places stand for themselves.
    """
    paths = [walk(*row) for row in zip(trees.rows, choice.tolist())]
    count = [len(path) for path in paths]
    places = range(max(count))
    node = [[*path, *places[len(path) :]] for path in paths]
    return choice.new_tensor(node).view(len(paths), -1), choice.new_tensor(count)


def draft_trees(
    logits: Tensor,
    nodes: int,
    sharpness: float | Tensor = 1.0,
    lift: Lift | None = None,
    lookups: list[Lookup] | None = None,
) -> Trees:
    """Best-first trees of the laws softmax(sharpness * logits + lift), [B, k, V].

    sharpness: a number, or one for each depth [k] (or more). A drafter that is too sure of itself
    makes deep and narrow trees: sharpness below 1 mends that.
    lift: of depths 2 to k, by the token before. lookups: the text of each row, which has a say of
    its own. Without either tokens are independent; with one the CHOICES likeliest of each depth
    are looked at, and what is guessed.
    """
    logits = logits[:, :nodes]  # a tree is no deeper
    if isinstance(sharpness, Tensor):
        sharpness = sharpness[: logits.shape[1], None]
    law = (sharpness * logits).log_softmax(-1)
    independent = lift is None and lookups is None
    best = law.topk(min(nodes if independent else CHOICES, logits.shape[-1]))
    lookups = lookups or [None] * len(law)
    candidates = zip(best.indices.tolist(), best.values.tolist(), lookups)
    texts = [
        (families([*zip(tokens, scores)], lift, lookup), lookup.last if lookup else ())
        for tokens, scores, lookup in candidates
    ]
    rows = [best_first(children, nodes, last) for children, last in texts]
    fewest, most = (f(len(row.token) for row in rows) for f in (min, max))
    if fewest < most:  # a row has no more prefixes: a smaller tree is the first nodes of a larger
        rows = [best_first(children, fewest, last) for children, last in texts]
    return Trees(rows, *torch.tensor([*zip(*(t[:3] for t in rows))], device=logits.device))


def families(
    depths: list[Ranked], lift: Lift | None = None, lookup: Lookup | None = None
) -> Callable[[int, Last], Ranked]:
    """`children` of `best_first` of one row, given the likeliest tokens of each depth alone.

    Other tokens are not lifted, so what all tokens add up to is 1 + sum over those of
    p (e^(weight lift) - 1). Behind the last depth there is what the lookup guesses.
    """
    places = [{token: i for i, token in enumerate(tokens)} for tokens, _ in depths]

    @cache
    def children(depth: int, last: Last) -> Ranked:
        drafted = depth < len(depths)
        tokens, law = depths[depth] if drafted else ([], [])
        scores, place = law, places[depth] if drafted else {}
        known = lift.behind(last[-1]) if lift and depth else {}
        if both := known.keys() & place.keys():
            more = {place[v]: lift.weight[depth] * known[v] for v in both}
            total = log1p(sum(exp(law[i]) * expm1(x) for i, x in more.items()))
            scores = [x - total for x in law]
            for i, x in more.items():
                scores[i] += x
        guess, chance = lookup.guess(last) if lookup else (None, 0.0)
        if chance:
            scores = [x + log1p(-chance) for x in scores]
            if guess in place:
                scores[place[guess]] = log(exp(scores[place[guess]]) + chance)
            else:
                tokens, scores = [*tokens, guess], [*scores, log(chance)]
        if scores is law:
            return tokens, law
        order = sorted(range(len(tokens)), key=scores.__getitem__, reverse=True)
        return [tokens[i] for i in order], [scores[i] for i in order]

    return children
