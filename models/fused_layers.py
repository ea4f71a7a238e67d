"""Decoder layers on the CPU in fewer calls (numba, where it is installed), for inference only.

A decoding pass has few tokens, and a small model's layers are computed in less time than it takes
to call their modules: of the 23 ms of a token of SmolLM2, on two threads, 12 were products. A layer
of Llama's form is four products, attention, and a few loops over the tokens: here a call for each,
or, where `models.bfloat16_loops` has all of them, one call for many layers. The numbers are the
layer's own to the bit, or it is left as it is.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PreTrainedModel

from models.attention import GROUPED, Span, grouped
from models.few_queries import bfloat16_loops, bits, for_loops, loops, pool, rotated, taken
from models.hidden_states import READS_ONLY
from models.norms import FusedNorm
from models.packed import GATE_UP, QUERY_KEY_VALUE, Product, product_of

# The first token of each row, the slots of a pass, and the keys and values of some layers.
Memory = tuple[np.ndarray, Tensor, tuple[Tensor, Tensor]]
FEW = 64  # rows whose outputs of all layers are kept for the length of a pass
_ACTIVATIONS: dict[bytes, np.ndarray] = {}


class FusedForward:
    """The forward of a layer: x += attention(norm(x)), then x += down(act(gate) * up) of norm(x).

    It takes bfloat16 states with a cache and rotary angles; for everything else it calls `forward`.

    Args:
        layer: The layer, whose linear layers are packed and whose norms are fused.
        products: Those of its queries, keys and values; of attention's output; of gate and up; and
            of the MLP's output.

    Attributes:
        stack, place: The layers that run in one call with it, and which of them it is.
    """

    def __init__(self, layer: nn.Module, products: list[Product]):
        own, self.forward = layer.self_attn, layer.forward
        self._qkv, self._out, self._gate_up, self._down = products
        norms = layer.input_layernorm, layer.post_attention_layernorm
        self.norms = [_parts(norm) for norm in norms]
        self.own, self._size = own, own.head_dim
        self.activation = activations(layer.mlp.act_fn)
        self._heads = [x.out_features // own.head_dim for x in (own.q_proj, own.k_proj)]
        self._head_norms = [getattr(own, f"{x}_norm", None) for x in "qkv"]
        self.products = [product.weights for product in products if product.weights is not None]
        self.stack: Stack | None = None
        self.place = 0

    @property
    def head_norms(self) -> list[tuple[np.ndarray, float]]:
        """Return the weights and epsilons of the norms of queries' and keys' heads."""
        return [_parts(norm) for norm in self._head_norms[:2]]

    def form(self) -> tuple | None:
        """Return what layers that run in one call share; None where it must be a call for each."""
        here, (*asked, value) = bfloat16_loops(), self._head_norms
        if here is None or len(self.products) < 4 or value is not None or self._size % here.GROUP:
            return None
        if not all(norm is None or _is_of_heads(norm, self.own) for norm in asked):
            return None
        norms = [(len(weight), epsilon) for weight, epsilon in self.norms + self.head_norms]
        sizes = [len(bias) for _, bias in self.products], self._heads, self._size, self.own.scaling
        window = getattr(self.own, "sliding_window", None)
        return norms, sizes, id(self.activation), window

    def __call__(self, hidden_states: Tensor, *others: Any, **given: Any) -> Any:
        """Return the layer's output [B, Q, H]; the arguments are the layer's own."""
        if self.stack is not None and not others:
            found = self.stack.known(self.place, hidden_states, **given)
            if found is not None:
                return found
        if others or not self._takes(hidden_states, **given):
            return self.forward(hidden_states, *others, **given)
        if self.stack is not None:
            found = self.stack.run(self.place, hidden_states, **given)
            if found is not None:
                return found
        rows = hidden_states.reshape(-1, hidden_states.shape[-1]).contiguous()
        memory = self.memory([self.own.layer_idx], rows, **given)
        count = len(rows)
        padding = max(0, self._qkv.fewest - count)
        normed, total = rows.new_empty(count + padding, rows.shape[1]), torch.empty_like(rows)
        normed[count:] = 0
        (first, second), compiled, out = self.norms, loops(), bits(normed)
        assert compiled is not None  # `fuse` has asked
        compiled.rms_norm(bits(rows), *first, out)
        found = self._attend(self._qkv.multiply(normed), memory, **given)
        added = bits(self._out.multiply(found))
        compiled.add_and_norm(bits(rows), added, *second, bits(total), out)
        gates = self._gate_up.multiply(normed)
        active = gates.new_empty(len(gates), gates.shape[1] // 2)
        with pool(compiled):
            compiled.gate(bits(gates), self.activation, bits(active))
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

    def memory(
        self,
        layers: list[int],
        rows: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor,
        past_key_values: Cache | None = None,
        cache: Cache | None = None,
        **others: Any,
    ) -> Memory | None:
        """Return where the loops write keys and values of layers; None where they cannot."""
        (batch, length, size), (asked, held) = position_embeddings[0].shape, self._heads
        written: Any = cache if past_key_values is None else past_key_values
        if not hasattr(written, "memory"):
            return None
        if not written.places.flat and not taken(batch, asked * length, held, size, attention_mask):
            return None
        memory = written.memory(layers, held, size, rows)
        return None if memory is None else (written.places.starts, written.places.slots, memory)

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
        heads, scaling = states.unflatten(-1, (-1, size)), self.own.scaling
        if any(self._head_norms):
            parts = zip(self._head_norms, heads.split((asked, held, held), 1))
            heads = torch.cat([x if norm is None else norm(x) for norm, x in parts], 1)
        if memory is not None:
            starts, slots, (keys, values) = memory
            placed = position_embeddings, starts, slots, (keys[0], values[0]), attention_mask
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
        key, value = written.update(turned[1], value, self.own.layer_idx)
        read = turned[0], key, value, attention_mask, scaling
        return grouped(self.own, *read, spans=spans)[0].flatten(0, 1).flatten(1)


class Stack:
    """Layers of one form that run in one call, each on the output of the one before.

    The call is the first one's. The others give the outputs that it computed, where they are given
    what it computed them from: the very tensor, with the same angles, mask and cache. A call ends
    at a layer with hooks that may change what the next one reads.

    Args:
        layers: One after the other, each with its fused forward.
    """

    def __init__(self, layers: list[nn.Module]):
        forwards: list[Any] = [layer.forward for layer in layers]
        self._layers, self._first = layers, forwards[0]
        self._numbers = [forward.own.layer_idx for forward in forwards]
        norms = zip(*(forward.norms + forward.head_norms for forward in forwards))
        self._norms = [_stacked(of) for of in norms]
        products = zip(*(forward.products for forward in forwards))
        self._products = [
            (np.array(weights), np.stack(biases))
            for weights, biases in (zip(*of) for of in products)
        ]
        # What the last call computed, by layer, and from what; nothing once all layers gave it.
        self._known: tuple[dict[int, Tensor], tuple] = {}, ()
        self._alone = False  # each layer computes itself, as they read different things

    def known(self, place: int, states: Tensor, **given: Any) -> Tensor | None:
        """Return the output of a layer that the last call computed from these states, if it did."""
        outputs, of = self._known
        if place not in outputs or states is not outputs.get(place - 1):
            return None
        if any(x is not y for x, y in zip(of, _read(**given))):
            self._alone = True
            return None
        if place + 1 == len(self._layers):
            self._known = {}, ()
        return outputs[place]

    def run(self, place: int, states: Tensor, **given: Any) -> Tensor | None:
        """Return a layer's output [B, Q, H] of states, and keep those of the layers after it.

        None where the loops do not write to the cache.
        """
        here = bfloat16_loops()
        assert here is not None  # as the products are of it
        rows = states.reshape(-1, states.shape[-1]).contiguous()
        end = place + 1 if self._alone or len(rows) > FEW else self._end(place)
        memory = self._first.memory(self._numbers[place:end], rows, **given)
        if memory is None and end > place + 1:  # of layers that are not side by side in a cache
            end = place + 1
            memory = self._first.memory(self._numbers[place:end], rows, **given)
        if memory is None:
            return None
        found, these = rows.new_empty(end - place, *rows.shape), slice(place, end)
        first, second, *head_norms = ((weight[these], eps) for weight, eps in self._norms)
        qkv, output, gate_up, down = ((w[these], bias[these]) for w, bias in self._products)
        (angles, mask, *_), (starts, slots, kept) = (read := _read(**given)), memory
        attention = first, qkv, tuple(head_norms), *for_loops(angles, starts, slots, kept, mask)
        mlp = output, second, gate_up, self._first.activation, down
        with pool(here) as threads:
            here.layers(bits(rows), *attention, self._first.own.scaling, *mlp, bits(found), threads)
        outputs = found.view(-1, *states.shape).unbind()
        self._known = ({}, ()) if len(outputs) == 1 else (dict(enumerate(outputs, place)), read)
        return outputs[0]

    def _end(self, place: int) -> int:
        """Return the layer before which a call from a layer on ends."""
        for i in range(place, len(self._layers) - 1):
            after, before = self._layers[i]._forward_hooks, self._layers[i + 1]._forward_pre_hooks
            if after or before:
                hooks = *after.values(), *before.values()
                if not all(hasattr(hook, READS_ONLY) for hook in hooks):
                    return i + 1
        return len(self._layers)


def _read(
    position_embeddings: Any = None,
    attention_mask: Any = None,
    past_key_values: Any = None,
    cache: Any = None,
    context: Tensor | None = None,
    **others: Any,
) -> tuple[Any, Any, Any, bool]:
    """Return what a layer reads beside its states: angles, mask, cache; and if there is context."""
    written = cache if past_key_values is None else past_key_values
    return position_embeddings, attention_mask, written, context is not None and context.numel() > 0


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
    _stack(network)


def _stack(network: PreTrainedModel) -> None:
    """Let neighbours among a network's fused layers run in one call, where they can."""
    stacks: list[list[nn.Module]] = []
    before: tuple | None = None
    for layer in network.modules():
        forward = layer.forward
        if not isinstance(forward, FusedForward) or (form := forward.form()) is None:
            continue
        if before != (form, forward.own.layer_idx - 1):
            stacks.append([])
        forward.place, before = len(stacks[-1]), (form, forward.own.layer_idx)
        stacks[-1].append(layer)
    for layers in stacks:
        stack = Stack(layers)
        for layer in layers:
            layer.forward.stack = stack  # type: ignore[attr-defined]


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


def _stacked(norms: Sequence[tuple[np.ndarray, float]]) -> tuple[np.ndarray, float]:
    """Return the weights [L, D] of norms, which have one epsilon."""
    weights, epsilons = zip(*norms)
    return np.stack(weights), epsilons[0]


def activations(act: Callable[[Tensor], Tensor]) -> np.ndarray:
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
