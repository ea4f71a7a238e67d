"""Spiffy's directed draft graphs: which later states of a block are drafted, and their parents.

Source: Spiffy, arXiv 2509.18085, section 4.3. A node is a draft state, given by a formula: a set of
pairs (i, j) of ranks from 1; the i-th most confident masked position has its j-th most probable
token. A node's parents are the states from which one denoising step may lead to it (Eq. 6-8). Node
0 is the current state, with the empty formula.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from data.files import read_json

MOST_NODES = 1024  # each is a state of a pass
Formula = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class DraftGraph:
    """A draft graph of D nodes.

    Attributes:
        block_size: Tokens of the blocks that the graph was calibrated for.
        tokens_per_step: S: a node of level l has l S tokens (Eq. 6-7). None with a threshold, where
            a step unmasks any number of tokens.
        nodes: The formulas of nodes 1 to D.
    """

    block_size: int
    tokens_per_step: int | None
    nodes: tuple[Formula, ...]

    def __post_init__(self):
        if len(self.nodes) > MOST_NODES:
            raise ValueError(f"a draft graph of over {MOST_NODES} nodes is not allowed")
        for n, (node, parents) in enumerate(zip(self.nodes, self.parents), 1):
            S, positions = self.tokens_per_step, {i for i, _ in node}
            problem = ""
            if len(positions) < len(node) or not node:
                problem = "must fill at least one position, and each position only once"
            elif min(min(pair) for pair in node) < 1 or max(positions) > self.block_size:
                problem = (
                    f"is out of range: position ranks are in 1..{self.block_size}, vocabulary "
                    "ranks start at 1"
                )
            elif S is not None and len(node) % S:
                problem = (
                    f"has {len(node)} tokens: with tokens_per_step={S} their number must be a "
                    f"multiple of {S}"
                )
            elif not parents:
                problem = (
                    "has no parent, so it can never be accepted: a step adds "
                    f"{S or 'some'} tokens and changes no other"
                )
            if problem:
                raise ValueError(f"node {n} of the draft graph, {show(node)}, {problem}")

    @cached_property
    def parents(self) -> list[list[int]]:
        """Return the numbers of each node's parents; 0 is the current state."""
        known = [*enumerate(((), *self.nodes))]
        return [
            [n for n, other in known if may_follow(other, node, self.tokens_per_step)]
            for node in self.nodes
        ]

    def formula(self, n: int) -> Formula:
        """Return the formula of node n; 0 is the current state."""
        return ((), *self.nodes)[n]

    @cached_property
    def levels(self) -> list[int]:
        """Return the level of each node: the fewest steps from the current state."""
        levels = {0: 0}
        order = sorted(range(1, len(self.nodes) + 1), key=lambda n: len(self.nodes[n - 1]))
        for n in order:
            levels[n] = 1 + min(levels[p] for p in self.parents[n - 1])
        return [levels[n] for n in range(1, len(self.nodes) + 1)]

    @property
    def reach(self) -> float:
        """Return the most masks with which one step from a draft may still fill the block."""
        return reach_of(self.nodes, self.tokens_per_step)

    def to_dict(self) -> dict:
        """Return the graph as a JSON object, which `read_graph` reads."""
        nodes = [{"tokens": [list(pair) for pair in node]} for node in self.nodes]
        sizes = {"block_size": self.block_size, "tokens_per_step": self.tokens_per_step}
        return {**sizes, "nodes": nodes}


def graph_of(
    block_size: int, tokens_per_step: int | None, formulas: Iterable[Iterable[tuple[int, int]]]
) -> DraftGraph:
    """Make the draft graph of formulas in any order, with the arguments of `DraftGraph`."""
    nodes = sorted((tuple(sorted(f)) for f in formulas), key=lambda node: (len(node), node))
    return DraftGraph(block_size, tokens_per_step, tuple(nodes))


def may_follow(parent: Formula, node: Formula, tokens_per_step: int | None) -> bool:
    """Return whether one denoising step may lead from one state to another (Eq. 7-8)."""
    added = len(node) - len(parent)
    return {*parent} < {*node} and (added == tokens_per_step or tokens_per_step is None)


def reach_of(nodes: Iterable[Formula], tokens_per_step: int | None) -> float:
    """Return `DraftGraph.reach` of these nodes: the tokens of the largest one, and a step's.

    >>> reach_of([((1, 1),), ((1, 1), (2, 1))], 1), reach_of([], None)
    (3, inf)
    """
    if tokens_per_step is None:
        return math.inf
    return max(map(len, nodes), default=0) + tokens_per_step


def chain_graph(block_size: int, tokens_per_step: int | None, length: int) -> DraftGraph:
    """Make a chain: n steps ahead, the most confident positions have their best tokens.

    It needs no calibration. These are the drafts of FreeDave (arXiv 2510.00294), at most `length`:
    a draft leaves at least one mask.

    >>> [show(node) for node in chain_graph(4, 1, 9).nodes]
    ['c11', 'c11 c21', 'c11 c21 c31']
    """
    if length < 1:
        raise ValueError(f"graph=chain:{length} is not allowed: give at least one draft, chain:4")
    S = tokens_per_step or 1
    sizes = range(S, min(S * length, block_size - 1) + 1, S)
    nodes = [[(i, 1) for i in range(1, n + 1)] for n in sizes]
    return graph_of(block_size, tokens_per_step, nodes)


def read_graph(source: str | dict) -> DraftGraph:
    """Read a graph from its JSON, a file or an object; ValueError where it is not valid."""
    if isinstance(source, str):
        try:
            source = read_json(Path(source))
        except (OSError, ValueError) as error:
            raise ValueError(f"cannot read a draft graph from {source!r}: {error}") from error
    try:
        nodes = tuple(tuple((i, j) for i, j in node["tokens"]) for node in source["nodes"])
        return DraftGraph(source["block_size"], source["tokens_per_step"], nodes)
    except (KeyError, TypeError) as error:
        raise ValueError(
            "not a draft graph: block_size, tokens_per_step and nodes with tokens are required "
            f"({type(error).__name__}: {error})"
        ) from error


def show(node: Formula) -> str:
    """Show a formula in the paper's notation: c11 c21, or c1,12 where a rank has two digits."""
    return " ".join(f"c{i}{j}" if max(i, j) < 10 else f"c{i},{j}" for i, j in node) or "now"
