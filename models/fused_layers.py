"""Decoder layers on the CPU in fewer calls (numba, where it is installed), for inference only.

A decoding pass has few tokens, and a small model's layers are computed in less time than it takes
to call their modules: of the 23 ms of a token of SmolLM2, on two threads, 12 were products. A layer
of Llama's form is four products, attention, and a few loops over the tokens: here one call, where
`models.bfloat16_loops` has all of them, else a call for each. Its numbers are the layer's own to
the bit, or it is left as it is.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PreTrainedModel

from models.attention import GROUPED, Span, grouped
from models.few_queries import bfloat16_loops, bits, few, for_loops, loops, pool, rotated
from models.norms import FusedNorm
from models.packed import GATE_UP, QUERY_KEY_VALUE, Product, product_of

# The first token of each row, the slots of a pass, and the keys and values of a layer.
Memory = tuple[np.ndarray, Tensor, tuple[Tensor, Tensor]]
_ACTIVATIONS: dict[bytes, np.ndarray] = {}


class FusedForward:
    """The forward of a layer: x += attention(norm(x)), then x += down(act(gate) * up) of norm(x).

    It takes bfloat16 states with a cache and rotary angles; for everything else it calls `forward`.

    Args:
        layer: The layer, whose linear layers are packed and whose norms are fused.
        products: Those of its queries, keys and values; of attention's output; of gate and up; and
            of the MLP's output.
    """

    def __init__(self, layer: nn.Module, products: list[Product]):
        own, self.forward = layer.self_attn, layer.forward
        self._qkv, self._out, self._gate_up, self._down = products
        norms = layer.input_layernorm, layer.post_attention_layernorm
        self._norms = [_parts(norm) for norm in norms]
        self._own, self._size = own, own.head_dim
        self._activation = _values(layer.mlp.act_fn)
        self._heads = [x.out_features // own.head_dim for x in (own.q_proj, own.k_proj)]
        self._head_norms = [getattr(own, f"{x}_norm", None) for x in "qkv"]
        # What `models.bfloat16_loops.layer` takes.
        self._weights = [product.weights for product in products if product.weights is not None]
        *asked, value = self._head_norms
        here, whole = bfloat16_loops(), len(self._weights) == len(products) and value is None
        whole = whole and here is not None and own.head_dim % here.GROUP == 0
        self._at_once = whole and all(norm is None or _is_of_heads(norm, own) for norm in asked)
        self._head_parts = tuple(_parts(norm) for norm in asked) if self._at_once else ()

    def __call__(self, hidden_states: Tensor, *others: Any, **given: Any) -> Any:
        """Return the layer's output [B, Q, H]; the arguments are the layer's own."""
        if others or not self._takes(hidden_states, **given):
            return self.forward(hidden_states, *others, **given)
        rows = hidden_states.reshape(-1, hidden_states.shape[-1]).contiguous()
        memory = self._memory(rows, **given)
        if memory is not None and self._at_once:
            return self._in_one_call(rows, memory, **given).view(hidden_states.shape)
        count = len(rows)
        padding = max(0, self._qkv.fewest - count)
        normed, total = rows.new_empty(count + padding, rows.shape[1]), torch.empty_like(rows)
        normed[count:] = 0
        (first, second), compiled, out = self._norms, loops(), bits(normed)
        assert compiled is not None  # `fuse` has asked
        compiled.rms_norm(bits(rows), *first, out)
        found = self._attend(self._qkv.multiply(normed), memory, **given)
        added = bits(self._out.multiply(found))
        compiled.add_and_norm(bits(rows), added, *second, bits(total), out)
        gates = self._gate_up.multiply(normed)
        active = gates.new_empty(len(gates), gates.shape[1] // 2)
        with pool(compiled):
            compiled.gate(bits(gates), self._activation, bits(active))
        total += self._down.multiply(active)[:count]
        return total.view(hidden_states.shape)

    def _takes(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        cache: Cache | None = None,
        context: Tensor | None = None,
        **others: Any,
    ) -> bool:
        """Return whether the loops compute what the layer would."""
        if position_embeddings is None or attention_mask is None:
            return False
        angles = position_embeddings[0]
        return (
            not (past_key_values is None and cache is None)
            and angles.shape == (*hidden_states.shape[:2], self._size)
            and hidden_states.dtype == angles.dtype == torch.bfloat16
            and (context is None or not context.shape[1])
            and not torch.is_grad_enabled()
        )

    def _memory(
        self,
        rows: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor,
        past_key_values: Cache | None = None,
        cache: Cache | None = None,
        **others: Any,
    ) -> Memory | None:
        """Return where the loops write keys and values; None where they do not attend."""
        (batch, length, size), (asked, held) = position_embeddings[0].shape, self._heads
        written: Any = cache if past_key_values is None else past_key_values
        if not hasattr(written, "memory"):
            return None
        if not written.places.flat and not few(batch, asked * length, held, attention_mask):
            return None
        memory = written.memory(self._own.layer_idx, held, size, rows)
        return None if memory is None else (written.places.starts, written.places.slots, memory)

    def _in_one_call(
        self,
        rows: Tensor,
        memory: Memory,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor,
        **others: Any,
    ) -> Tensor:
        """Return the layer's output [n, H] of rows [n, H]."""
        compiled, here, found = loops(), bfloat16_loops(), torch.empty_like(rows)
        assert compiled is not None  # as `fuse` has asked
        assert here is not None  # as the products are of it
        (first, second), (qkv, output, gate_up, down) = self._norms, self._weights
        given = for_loops(position_embeddings, *memory, attention_mask)
        attention = first, qkv, self._head_parts, *given, self._own.scaling, output
        mlp = second, gate_up, self._activation, down
        with pool(compiled) as threads:
            here.layer(bits(rows), *attention, *mlp, bits(found), threads)
        return found

    def _attend(
        self,
        states: Tensor,
        memory: Memory | None,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor,
        past_key_values: Cache | None = None,
        cache: Cache | None = None,
        spans: Sequence[Span] | None = None,
        **others: Any,
    ) -> Tensor:
        """Return what attention finds [B Q, heads D], from queries, keys and values [B Q, ...].

        Both may have more rows, of padding.
        """
        (batch, length, size), (asked, held) = position_embeddings[0].shape, self._heads
        heads, scaling = states.unflatten(-1, (-1, size)), self._own.scaling
        if any(self._head_norms):
            parts = zip(self._head_norms, heads.split((asked, held, held), 1))
            heads = torch.cat([x if norm is None else norm(x) for norm, x in parts], 1)
        if memory is not None:
            placed = position_embeddings, *memory, attention_mask
            return rotated(heads, *placed, scaling).flatten(1)
        written = cache if past_key_values is None else past_key_values
        assert written is not None
        heads, angles = heads[: batch * length], [bits(x.contiguous()) for x in position_embeddings]
        compiled, turned = loops(), []
        assert compiled is not None
        for first, count in zip((0, asked), self._heads):
            turned.append(heads.new_empty(batch, count, length, size))
            compiled.rotate(bits(heads), first, *angles, bits(turned[-1]))
        value = heads[:, asked + held :].unflatten(0, (batch, length)).transpose(1, 2)
        key, value = written.update(turned[1], value, self._own.layer_idx)
        read = turned[0], key, value, attention_mask, scaling
        return grouped(self._own, *read, spans=spans)[0].flatten(0, 1).flatten(1)


@torch.no_grad()
def fuse(network: PreTrainedModel) -> None:
    """Let a CPU network's layers of Llama's form run in fewer calls, in place.

    Some families use other formulas under the same names, so a layer is only replaced if both
    forwards agree to the bit.
    """
    if loops() is None or network.config._attn_implementation != GROUPED:
        return
    for layer in [*network.modules()]:
        fused = _fused(layer)
        if fused is not None and _same(layer, fused):
            layer.forward = fused  # type: ignore[assignment]


def is_fused(network: PreTrainedModel) -> bool:
    """Return whether all decoder layers of a network run in fewer calls."""
    layers = getattr(network.get_decoder(), "layers", None) or [network]
    return all(isinstance(layer.forward, FusedForward) for layer in layers)


def _fused(layer: nn.Module) -> FusedForward | None:
    """Return the forward of a layer's parts; None where it has others."""
    own, mlp = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
    norms = [getattr(layer, f"{name}_layernorm", None) for name in ("input", "post_attention")]
    if own is None or mlp is None or not all(isinstance(norm, FusedNorm) for norm in norms):
        return None
    found = (
        product_of(own, *QUERY_KEY_VALUE),
        product_of(own, "o_proj"),
        product_of(mlp, *GATE_UP),
        product_of(mlp, "down_proj"),
    )
    products = [product for product in found if product is not None]
    needed = (own, "head_dim"), (own, "layer_idx"), (own, "scaling"), (mlp, "act_fn")
    if len(products) < len(found) or not all(hasattr(*pair) for pair in needed):
        return None
    return FusedForward(layer, products)


def _is_of_heads(norm: nn.Module, attention: nn.Module) -> bool:
    """Return whether a norm is a loop over the numbers of each head."""
    return isinstance(norm, FusedNorm) and norm.weight.numel() == attention.head_dim


def _parts(norm: nn.Module | None) -> tuple[np.ndarray, float]:
    """Return a norm's weight, as bits, and its epsilon; without a norm no weight."""
    if norm is None:
        return np.empty(0, np.uint16), 0.0
    return bits(norm.weight), float(norm.variance_epsilon)


def _values(act: Callable[[Tensor], Tensor]) -> np.ndarray:
    """Return the bits of act(x) for the bits of every bfloat16 x, shared by layers of one act."""
    every = torch.arange(2**16).to(torch.uint16).view(torch.bfloat16)
    found = bits(act(every))
    return _ACTIVATIONS.setdefault(found.tobytes(), found)


@torch.inference_mode()
def _same(layer: nn.Module, fused: Callable) -> bool:
    """Return whether two forwards have the same bits: outputs, keys and values of random states."""
    size, length, draw = layer.self_attn.head_dim, 5, torch.Generator().manual_seed(0)
    hidden = layer.input_layernorm.weight.numel()
    states, cos, sin = (
        torch.randn(1, length, n, generator=draw).bfloat16() for n in (hidden, size, size)
    )
    mask = torch.full((1, 1, length, length), -torch.inf).triu(1).bfloat16()
    given = {"attention_mask": mask, "position_embeddings": (cos, sin), "context": states[:, :0]}
    takes = inspect.signature(layer.forward).parameters
    given = {name: x for name, x in given.items() if name in takes}
    name = "cache" if "cache" in takes else "past_key_values"

    def run(forward: Callable) -> tuple[Tensor, Tensor, Tensor]:
        cache = DynamicCache()
        output = forward(states, **given, **{name: cache})
        return output, cache.layers[-1].keys, cache.layers[-1].values

    try:
        return all(torch.equal(*pair) for pair in zip(run(layer.forward), run(fused)))
    except Exception:  # of a layer that takes or gives something else, whatever it says
        return False
