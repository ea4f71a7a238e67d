"""A recurrent drafter's runs on the CPU as one call each (numba, where it is installed).

Of the 0.5 ms that a run took on two threads, 0.2 were calls of modules. The numbers are the
network's own to the bit.
"""

from collections.abc import Iterable

import numpy as np
from torch import Tensor, nn
from torch.nn.functional import silu

from models.few_queries import bfloat16_loops, bits, pool
from models.fused_layers import activations
from models.norms import FusedNorm
from models.packed import GATE_UP, product_of
from models.redrafter import Redrafter


class FusedRun:
    """The loops that compute a recurrent drafter."""

    def __init__(self, network: Redrafter, weights: list[tuple[int, np.ndarray]]):
        self._network = network  # has the weights, of which these are the addresses
        self._fc, self._gate_up, self._down, self._head = weights
        self._state_norms = _weights(network.state_norms)
        norms = network.hidden_norm, network.embedding_norm, network.norm
        self._norms, self._epsilon = _weights(norms), network.norm.variance_epsilon
        self._activation = activations(silu)

    def combined(self, states: Tensor) -> Tensor:
        """Compute `Redrafter.combined`: h_0 [..., H] of the target's states [..., L H]."""
        count, hidden = self._state_norms.shape
        read = states.reshape(-1, count, hidden).contiguous()
        found = read.new_empty(len(read), hidden)
        here = bfloat16_loops()
        assert here is not None  # as `fused` has asked
        with pool(here) as threads:
            norms = self._state_norms, self._epsilon
            here.combine(bits(read), *norms, self._fc, bits(found), threads)
        return found.view(*states.shape[:-1], hidden)

    def __call__(self, embedded: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Read tokens: logits [..., Vd], and h_j [..., H], of embeddings and h_{j-1} [..., H]."""
        here, hidden = bfloat16_loops(), state.shape[-1]
        assert here is not None  # as `fused` has asked
        read = [x.reshape(-1, hidden).contiguous() for x in (embedded, state)]
        found = read[1].new_empty(read[1].shape)
        logits = found.new_empty(len(found), len(self._head[1]))
        norms, mlp = (self._norms, self._epsilon), (self._gate_up, self._activation, self._down)
        with pool(here) as threads:
            here.run(*map(bits, read), *norms, *mlp, self._head, bits(logits), bits(found), threads)
        return logits.view(*state.shape[:-1], -1), found.view(state.shape)


def fused(network: Redrafter) -> FusedRun | None:
    """Return the loops of a drafter that was made for inference; None where there are none."""
    products = (
        product_of(network, "fc"),
        product_of(network.mlp, *GATE_UP),
        product_of(network.mlp, "down_proj"),
        product_of(network, "lm_head"),
    )
    weights = [product.weights for product in products if product is not None]
    known = [of for of in weights if of is not None]
    norms = *network.state_norms, network.hidden_norm, network.embedding_norm, network.norm
    normed = all(isinstance(norm, FusedNorm) for norm in norms)
    if bfloat16_loops() is None or len(known) < len(products) or not normed:
        return None
    return FusedRun(network, known)


def _weights(norms: Iterable[nn.Module]) -> np.ndarray:
    """Return the bits of norms' weights, [L, H]."""
    return np.stack([bits(norm.weight) for norm in norms])
