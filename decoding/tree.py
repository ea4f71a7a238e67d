"""Draft trees: the likeliest continuations under independent marginals, for one pass to verify."""

from heapq import heappop, heappush
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

ROOT = -1
LIMIT = 63  # nodes: a path is a set of nodes, one bit each


class Tree(NamedTuple):
    """A tree of tokens behind the last committed one, the root. Parents come before children.

    token, depth (1 at the root's children), path (bits of the nodes from the root to this one):
    of each node. child: {(parent, token): node}.
    """

    token: list[int]
    depth: list[int]
    path: list[int]
    child: dict[tuple[int, int], int]


def best_first(tokens: list[list[int]], scores: list[list[float]], nodes: int) -> Tree:
    """The `nodes` likeliest prefixes of k independent tokens.

    tokens, scores [k][M]: for each depth the likeliest tokens, best first, and the logarithms of
    their probabilities. A prefix is never likelier than a shorter one of itself, so nodes taken
    in the order of their probability form a tree.

    >>> best_first([[5, 6], [7, 8]], [[-0.1, -2.0], [-0.5, -0.9]], 3).token
    [5, 7, 8]
    """
    tree = Tree([], [], [], {})
    heap = [(-scores[0][0], 0, 0, ROOT, 0.0)]
    while heap and len(tree.token) < nodes:
        cost, depth, rank, parent, before = heappop(heap)
        node, token = len(tree.token), tokens[depth][rank]
        tree.token.append(token)
        tree.depth.append(depth + 1)
        tree.path.append((tree.path[parent] if parent != ROOT else 0) | 1 << node)
        tree.child[parent, token] = node
        if rank + 1 < len(tokens[depth]):
            heappush(heap, (before - scores[depth][rank + 1], depth, rank + 1, parent, before))
        if depth + 1 < len(tokens):
            heappush(heap, (cost - scores[depth + 1][0], depth + 1, 0, node, cost))
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
    count = torch.tensor([len(path) for path in paths], device=choice.device)
    node = torch.arange(int(count.max()), device=choice.device).repeat(len(paths), 1)
    for b, path in enumerate(paths):
        node[b, : len(path)] = node.new_tensor(path)
    return node, count


def draft_trees(logits: Tensor, nodes: int, sharpness: float | Tensor = 1.0) -> Trees:
    """Best-first trees of the marginals softmax(sharpness * logits), [B, k, V].

    sharpness: a number, or one for each depth [k] (or more). A drafter that is too sure of itself
    makes deep and narrow trees: sharpness below 1 mends that.
    """
    logits = logits[:, :nodes]  # a tree is no deeper
    if isinstance(sharpness, Tensor):
        sharpness = sharpness[: logits.shape[1], None]
    best = (sharpness * logits).log_softmax(-1).topk(min(nodes, logits.shape[-1]))
    rows = [best_first(*row, nodes) for row in zip(best.indices.tolist(), best.values.tolist())]
    fields = (torch.tensor([tree[i] for tree in rows], device=logits.device) for i in range(3))
    return Trees(rows, *fields)
