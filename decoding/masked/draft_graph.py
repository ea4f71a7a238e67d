"""Draft graphs of Spiffy as data: which states of a block are guessed, by which formulas.

Source: Spiffy, arXiv 2509.18085, section 4.3. A formula is a set of (i, j): at the i-th of the
masked places, ordered by confidence, stands the j-th of its tokens (both from 1). A node is a
parent of another one if a single step may lead from it there; node 0 is the present state, whose
formula is empty.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

Formula = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class DraftGraph:
    """Nodes 1 to D by their formulas, and each one's parents.

    block_size: tokens of the blocks that it was made for. tokens_per_step: S, so that a node of
    level l has l S tokens (Eq. 6-7); None where a threshold decides, and any number may come.
    """

    block_size: int
    tokens_per_step: int | None
    nodes: tuple[Formula, ...]
    parents: tuple[tuple[int, ...], ...]

    def __post_init__(self):
        for n, (node, parents) in enumerate(zip(self.nodes, self.parents, strict=True), 1):
            S, places = self.tokens_per_step, {i for i, _ in node}
            if len(places) < len(node) or not node:
                raise ValueError(
                    f"node {n} of the draft graph, {show(node)}, is no set of tokens at different "
                    "places"
                )
            if min(min(pair) for pair in node) < 1 or max(places) > self.block_size:
                raise ValueError(
                    f"node {n} of the draft graph, {show(node)}, does not fit: place ranks are in "
                    f"1..{self.block_size} and token ranks from 1 on"
                )
            if S is not None and len(node) % S:
                raise ValueError(
                    f"node {n} of the draft graph has {len(node)} tokens: at {S} tokens a step a "
                    f"node of level l has {S} l of them"
                )
            if not parents:
                raise ValueError(
                    f"node {n} of the draft graph, {show(node)}, has no parent: nothing can be "
                    "accepted before it"
                )
            for p in parents:
                if not 0 <= p <= len(self.nodes) or not may_follow(self.formula(p), node, S):
                    raise ValueError(
                        f"node {p} cannot be a parent of node {n} of the draft graph, "
                        f"{show(node)}: a step adds {S or 'some'} tokens and changes none"
                    )

    def formula(self, n: int) -> Formula:
        """The formula of node n; 0 is the present state."""
        return self.nodes[n - 1] if n else ()

    @cached_property
    def levels(self) -> list[int]:
        """The level of each node: the fewest steps from the present state."""
        levels = {0: 0}
        order = sorted(range(1, len(self.nodes) + 1), key=lambda n: len(self.nodes[n - 1]))
        for n in order:
            levels[n] = 1 + min(levels[p] for p in self.parents[n - 1])
        return [levels[n] for n in range(1, len(self.nodes) + 1)]

    def for_blocks(self, block_size: int) -> "DraftGraph":
        """This graph, if it was made for blocks of that size."""
        if self.block_size != block_size:
            raise ValueError(
                f"the draft graph was made for block_size={self.block_size}, but blocks have "
                f"{block_size} tokens: calibrate one with python -m trainers.fit "
                "recipe=spiffy_calibrate"
            )
        return self

    def to_dict(self) -> dict:
        """As JSON holds it."""
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
    """The graph of these nodes with all parents that a node may have (Eq. 6-8)."""
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
    """Whether one step may lead from a state to another one (Eq. 7-8)."""
    added = len(node) - len(parent)
    return {*parent} < {*node} and (added == tokens_per_step or tokens_per_step is None)


def read_graph(source: str | dict) -> DraftGraph:
    """A graph from its JSON: a file, or the entry of an export."""
    if isinstance(source, str):
        try:
            source = json.loads(Path(source).read_text())
        except (OSError, json.JSONDecodeError) as error:
            raise ValueError(f"cannot read a draft graph from {source!r}: {error}") from error
    try:
        nodes = tuple(tuple((i, j) for i, j in node["tokens"]) for node in source["nodes"])
        parents = tuple(tuple(node["parents"]) for node in source["nodes"])
        return DraftGraph(source["block_size"], source["tokens_per_step"], nodes, parents)
    except (KeyError, TypeError) as error:
        raise ValueError(
            "this is no draft graph: block_size, tokens_per_step and nodes with tokens and parents "
            f"are needed ({type(error).__name__}: {error})"
        ) from error


def show(node: Formula) -> str:
    """A formula as the paper writes it: c11 c21, or c1,12 where a rank has two digits."""
    return " ".join(f"c{i}{j}" if max(i, j) < 10 else f"c{i},{j}" for i, j in node) or "now"
