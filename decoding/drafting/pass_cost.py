"""Measure how much longer a pass of several tokens takes than one of a single token.

Where passes wait for memory, several tokens take no longer than one; where they wait for the CPU's
arithmetic, each takes its time, and fewer drafts pay. It depends on the CPU, its threads and its
memory, so it is measured.
"""

from time import perf_counter

import torch
from torch import nn

from models.packed import PackedLinear

TOKENS = 8
DEAR = 1.25  # times as long as one token
FEWEST_BYTES, MOST_BYTES = 2**25, 2**28  # of the weights that are timed: more than caches keep
TURNS = 5


def is_dear(target: nn.Module) -> bool:
    """Return whether a pass of TOKENS tokens takes much longer than one of a single token."""
    return wide_pass(target) > DEAR


@torch.inference_mode()
def wide_pass(network: nn.Module) -> float:
    """Return how many times as long TOKENS tokens take as one in a CPU network's packed products.

    It is 1 where there are too few of them to tell.
    """
    layers: dict[int, PackedLinear] = {}
    size = 0
    for layer in network.modules():
        if (
            isinstance(layer, PackedLinear)
            and id(layer.product) not in layers
            and size < MOST_BYTES
        ):
            layers[id(layer.product)] = layer
            size += 2 * layer.in_features * layer.product.outputs
    if size < FEWEST_BYTES:
        return 1.0
    shortest = {1: float("inf"), TOKENS: float("inf")}
    for count in [*shortest] * TURNS:
        given = [(x, x.weight.new_ones(count, x.in_features)) for x in layers.values()]
        started = perf_counter()
        for layer, rows in given:
            layer.product.multiply(rows)
        shortest[count] = min(shortest[count], perf_counter() - started)
    return shortest[TOKENS] / shortest[1]
