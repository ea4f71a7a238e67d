"""What a wider pass costs here: it decides which drafts pay.

Where passes wait for memory, several tokens take no longer than one; where they wait for the CPU's
arithmetic each takes its time. Which it is depends on the CPU, its threads and its memory, so it is
measured.
"""

from time import perf_counter

import torch
from torch import nn
from transformers import PreTrainedModel

from models.packed import PackedLinear

TOKENS = 8
DEAR = 1.25  # times as long as one token
LEAST, SAMPLE = 2**25, 2**28  # bytes of weights: what is measured has more than caches keep
TURNS = 5


def is_dear(target: PreTrainedModel) -> bool:
    """Return whether a pass of a few tokens takes much longer than one of a single token."""
    return wide_pass(target, target.dtype) > DEAR


@torch.inference_mode()
def wide_pass(network: nn.Module, dtype: torch.dtype) -> float:
    """Return how many times as long as one token TOKENS take in a CPU network's packed products.

    1 where there are too few to tell.

    Args:
        dtype: The type of what the products read.
    """
    layers: dict[int, PackedLinear] = {}
    size = 0
    for layer in network.modules():
        if isinstance(layer, PackedLinear) and id(layer.product) not in layers and size < SAMPLE:
            layers[id(layer.product)] = layer
            size += 2 * layer.in_features * layer.product.outputs
    if size < LEAST:
        return 1.0
    shortest = {1: float("inf"), TOKENS: float("inf")}
    for count in [*shortest] * TURNS:
        sizes = {layer.in_features for layer in layers.values()}
        rows = {size: torch.ones(count, size, dtype=dtype) for size in sizes}
        started = perf_counter()
        for layer in layers.values():
            layer.product.multiply(rows[layer.in_features])
        shortest[count] = min(shortest[count], perf_counter() - started)
    return shortest[TOKENS] / shortest[1]
