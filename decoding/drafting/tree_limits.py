"""Limits of a draft tree's settings, which are checked before torch is imported."""

from math import inf

MAX_NODES = 63  # nodes of a tree: a path is a set of nodes, one bit each


def check_tree(nodes: int, sharpness: float | dict[float, list[float]]) -> None:
    """Check that `nodes` is in 1..MAX_NODES, and each sharpness positive and finite."""
    if not 1 <= nodes <= MAX_NODES:
        raise ValueError(f"nodes={nodes} is not allowed: it must be from 1 to {MAX_NODES}")
    depths = sharpness.values() if isinstance(sharpness, dict) else [[sharpness]]
    if not depths or not all(0 < x < inf for depth in depths for x in depth):
        raise ValueError(f"sharpness={sharpness} is not allowed: it must be above 0, and finite")
