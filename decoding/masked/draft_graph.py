"""Spiffy's directed draft graphs: which later states of a block are drafted, and their parents.

Source: Spiffy, arXiv 2509.18085, section 4.3. A node is a draft state, given by a formula: a set of
pairs (i, j) of a position rank and a vocabulary rank, both from 1. The i-th most confident masked
position is filled with its j-th most probable token. A node is a parent of another one if a single
denoising step may lead from the first to the second. Node 0 is the current state, whose formula is
empty.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from data.files import read_json

Formula = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class DraftGraph:
    """A draft graph of D nodes.

    Attributes:
        block_size: Tokens of the blocks that the graph was calibrated for.
        tokens_per_step: S: a node of level l has l S tokens (Eq. 6-7). None with a threshold, where
            a step unmasks any number of tokens.
        nodes: The formulas of nodes 1 to D.
        parents: The numbers of each node's parents; 0 is the current state.

    Raises:
        ValueError: A formula is not possible, or a node's parents are not.
    """

    block_size: int
    tokens_per_step: int | None
    nodes: tuple[Formula, ...]
    parents: tuple[tuple[int, ...], ...]

    def __post_init__(self):
        for n, (node, parents) in enumerate(zip(self.nodes, self.parents, strict=True), 1):
            S, positions = self.tokens_per_step, {i for i, _ in node}
            if len(positions) < len(node) or not node:
                raise ValueError(
                    f"node {n} of the draft graph, {show(node)}, must fill at least one position, "
                    "and each position only once"
                )
            if min(min(pair) for pair in node) < 1 or max(positions) > self.block_size:
                raise ValueError(
                    f"node {n} of the draft graph, {show(node)}, is out of range: position ranks "
                    f"are in 1..{self.block_size}, vocabulary ranks start at 1"
                )
            if S is not None and len(node) % S:
                raise ValueError(
                    f"node {n} of the draft graph, {show(node)}, has {len(node)} tokens: with "
                    f"tokens_per_step={S} their number must be a multiple of {S}"
                )
            if not parents:
                raise ValueError(
                    f"node {n} of the draft graph, {show(node)}, has no parent, so it can never be "
                    "accepted"
                )
            for p in parents:
                if not 0 <= p <= len(self.nodes) or not may_follow(self.formula(p), node, S):
                    raise ValueError(
                        f"node {p} cannot be a parent of node {n} of the draft graph, "
                        f"{show(node)}: a step adds {S or 'some'} tokens and changes no other"
                    )

    def formula(self, n: int) -> Formula:
        """The formula of node n; 0 is the current state."""
        return self.nodes[n - 1] if n else ()

    @cached_property
    def levels(self) -> list[int]:
        """The level of each node: the fewest steps from the current state."""
        levels = {0: 0}
        order = sorted(range(1, len(self.nodes) + 1), key=lambda n: len(self.nodes[n - 1]))
        for n in order:
            levels[n] = 1 + min(levels[p] for p in self.parents[n - 1])
        return [levels[n] for n in range(1, len(self.nodes) + 1)]

    @property
    def reach(self) -> float:
        """The most masks of a current state from whose drafts one step may fill the block."""
        return reach_of(self.nodes, self.tokens_per_step)

    def for_blocks(self, block_size: int) -> "DraftGraph":
        """The graph itself.

        Raises:
            ValueError: The graph was calibrated for another block size.
        """
        if self.block_size != block_size:
            raise ValueError(
                f"the draft graph was calibrated for block_size={self.block_size}, but the model "
                f"decodes with block_size={block_size}: calibrate one with python -m trainers.fit "
                "recipe=spiffy_calibrate"
            )
        return self

    def to_dict(self) -> dict:
        """The graph as a JSON object, which `read_graph` reads."""
        return {
            "block_size": self.block_size,
            "tokens_per_step": self.tokens_per_step,
            "nodes": [
                {"tokens": [list(pair) for pair in node], "parents": list(parents)}
                for node, parents in zip(self.nodes, self.parents)
            ],
        }


def graph_of(
    block_size: int, tokens_per_step: int | None, formulas: Iterable[Iterable[tuple[int, int]]]
) -> DraftGraph:
    """The draft graph of some nodes, each with every possible parent among them (Eq. 6-8).

    Args:
        block_size: Tokens of a block.
        tokens_per_step: S, or None with a threshold.
        formulas: The (position rank, vocabulary rank) pairs of each node.
    """
    nodes = tuple(sorted((tuple(sorted(f)) for f in formulas), key=lambda node: (len(node), node)))
    parents = tuple(
        tuple(
            p
            for p, other in enumerate(((), *nodes))
            if other != node and may_follow(other, node, tokens_per_step)
        )
        for node in nodes
    )
    return DraftGraph(block_size, tokens_per_step, nodes, parents)


def may_follow(parent: Formula, node: Formula, tokens_per_step: int | None) -> bool:
    """Whether one denoising step may lead from one state to another (Eq. 7-8)."""
    added = len(node) - len(parent)
    return {*parent} < {*node} and (added == tokens_per_step or tokens_per_step is None)


def reach_of(nodes: Iterable[Formula], tokens_per_step: int | None) -> float:
    """`DraftGraph.reach` of a graph of these nodes: the tokens of the largest one, and a step's.

    >>> reach_of([((1, 1),), ((1, 1), (2, 1))], 1), reach_of([], None)
    (3, inf)
    """
    if tokens_per_step is None:
        return math.inf
    return max(map(len, nodes), default=0) + tokens_per_step


def chain_graph(block_size: int, tokens_per_step: int | None, length: int) -> DraftGraph:
    """A chain of drafts: n steps ahead, the most confident positions have their best tokens.

    It needs no calibration. These are the drafts of FreeDave (arXiv 2510.00294).

    Args:
        block_size: L.
        tokens_per_step: S; None with a threshold.
        length: Drafts at most; a draft leaves at least one mask.

    Raises:
        ValueError: A length below 1.

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
    """A graph from its JSON.

    Args:
        source: A file, or the JSON object itself.

    Raises:
        ValueError: The file cannot be read, or does not describe a valid graph.
    """
    if isinstance(source, str):
        try:
            source = read_json(Path(source))
        except (OSError, ValueError) as error:
            raise ValueError(f"cannot read a draft graph from {source!r}: {error}") from error
    try:
        nodes = tuple(tuple((i, j) for i, j in node["tokens"]) for node in source["nodes"])
        parents = tuple(tuple(node["parents"]) for node in source["nodes"])
        return DraftGraph(source["block_size"], source["tokens_per_step"], nodes, parents)
    except (KeyError, TypeError) as error:
        raise ValueError(
            "not a draft graph: block_size, tokens_per_step and nodes with tokens and parents are "
            f"required ({type(error).__name__}: {error})"
        ) from error


def show(node: Formula) -> str:
    """A formula in the paper's notation: c11 c21, or c1,12 where a rank has two digits."""
    return " ".join(f"c{i}{j}" if max(i, j) < 10 else f"c{i},{j}" for i, j in node) or "now"
