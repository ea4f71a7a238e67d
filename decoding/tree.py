"""Draft trees: the likeliest continuations under independent marginals, for one pass to verify."""

from collections.abc import Callable
from heapq import heappop, heappush
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

ROOT = -1
LIMIT = 63  # nodes: a path is a set of nodes, one bit each
CHOICES, PARENTS = 32, 8  # tokens of a depth that know the token before them, and of those before

Lift = Callable[[Tensor, Tensor], Tensor]  # see draft_trees


class Tree(NamedTuple):
    """A tree of tokens behind the last committed one, the root. Parents come before children.

    token, depth (1 at the root's children), path (bits of the nodes from the root to this one):
    of each node. child: {(parent, token): node}.
    """

    token: list[int]
    depth: list[int]
    path: list[int]
    child: dict[tuple[int, int], int]


def best_first(
    tokens: list[list[int]],
    scores: list[list[list[float]]],
    nodes: int,
    index: list[list[list[int]]] | None = None,
) -> Tree:
    """The `nodes` likeliest prefixes of k tokens, each of which knows the one before it at most.

    tokens [k][K]: candidates of each depth. index, scores [k][P][M]: for each of the first P
    candidates of the depth before, which ones are the likeliest behind it, best first, and the
    logarithms of their probabilities; behind the other candidates nothing is drafted. index None:
    tokens are independent, P = 1, and candidates are in that order. A prefix is never likelier
    than a shorter one of itself, so nodes taken in the order of their probability form a tree.

    >>> best_first([[5, 6], [7, 8]], [[[-0.1, -2.0]], [[-0.5, -0.9]]], 3).token
    [5, 7, 8]
    """
    tree = Tree([], [], [], {})
    heap = [(-scores[0][0][0], 0, 0, ROOT, 0.0, 0)]
    while heap and len(tree.token) < nodes:
        cost, depth, rank, parent, before, p = heappop(heap)
        own = index[depth][p][rank] if index else rank
        node, token = len(tree.token), tokens[depth][own]
        tree.token.append(token)
        tree.depth.append(depth + 1)
        tree.path.append((tree.path[parent] if parent != ROOT else 0) | 1 << node)
        tree.child[parent, token] = node
        if rank + 1 < len(scores[depth][p]):
            sibling = before - scores[depth][p][rank + 1]
            heappush(heap, (sibling, depth, rank + 1, parent, before, p))
        own = own if index else 0
        if depth + 1 < len(tokens) and own < len(scores[depth + 1]):
            heappush(heap, (cost - scores[depth + 1][own][0], depth + 1, 0, node, cost, own))
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
) -> Trees:
    """Best-first trees of the laws softmax(sharpness * logits + lift), [B, k, V].

    sharpness: a number, or one for each depth [k] (or more). A drafter that is too sure of itself
    makes deep and narrow trees: sharpness below 1 mends that.
    lift: what the token before is to those of depths 2 to k, of u [B, k-1, P, 1] to v
    [B, k-1, 1, K] among the likeliest of each depth: [B, k-1, P, K]. None: they are independent.
    """
    logits = logits[:, :nodes]  # a tree is no deeper
    if isinstance(sharpness, Tensor):
        sharpness = sharpness[: logits.shape[1], None]
    law = (sharpness * logits).log_softmax(-1)
    best = law.topk(min(nodes if lift is None else CHOICES, logits.shape[-1]))
    lists = [best.indices, best.values[:, :, None]]
    if lift is not None:
        lists[1:] = lifted(best.indices, best.values, lift, nodes)
    rows = [
        best_first(tokens, scores, nodes, *index)
        for tokens, scores, *index in zip(*(x.tolist() for x in lists))
    ]
    return Trees(rows, *torch.tensor([*zip(*(t[:3] for t in rows))], device=logits.device))


def lifted(tokens: Tensor, law: Tensor, lift: Lift, nodes: int) -> tuple[Tensor, Tensor]:
    """scores and index of `best_first`, [B, k, P, M], of candidates [B, k, K].

    law: their logarithms of probabilities. Other tokens are not lifted, so what all tokens add up
    to is 1 + sum over candidates of p (e^lift - 1).
    """
    P, M = min(PARENTS, tokens.shape[-1]), min(nodes, tokens.shape[-1])
    more = lift(tokens[:, :-1, :P, None], tokens[:, 1:, None]).clamp_max(60)  # e^60 is a float
    total = (more.expm1() * law[:, 1:, None].exp()).sum(-1, keepdim=True).log1p()
    # Nothing that is drafted stands before the first depth: its lists are all the same.
    first = law[:, :1, None].expand(-1, 1, P, -1)
    return torch.cat([first, law[:, 1:, None] + more - total], 1).topk(M)
