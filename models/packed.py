"""Linear layers whose weights are stored as they are read fastest, for decoding on a CPU.

A decoding pass has few tokens, so it waits for memory: it reads every weight once. Layers that read
the same input are one product. What it is depends on the CPU:

- A compiled loop (numba, where it is installed) takes 7 ms for the 120 products of SmolLM2's layers
  and 1 to 8 tokens, 8 for 12, on two threads; with AVX2 alone 8 for 1 token, 9 for 5 and 11 for 8.
- Without numba, or with AMX, oneDNN reads weights faster in its own layout: 9, 10 and 12 ms.
- Without numba and AVX-512 a product in bfloat16 takes several times one in float32 from 8 tokens
  on, and so does what a network multiplies beside its linear layers. Then weights keep their 16
  bits and are converted as they are read: for few tokens in a compiled loop (numba), for more in
  blocks that fit into the cache. The numbers are those of float32, at half of its memory.
"""

import ctypes
import sys
import threading
from abc import ABC, abstractmethod

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from models.attention import GROUPED
from models.few_queries import bfloat16_loops, bits, loops, pool
from models.markov import MarkovHead
from models.placement import is_spread

# Layers of one parent that read the same input, by the names that transformers' models give them.
QUERY_KEY_VALUE, GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
TOGETHER = (QUERY_KEY_VALUE, GATE_UP)
_USUAL = 32  # rows that the layout is chosen for
_MOST = 16  # rows up to which the compiled loop is faster than products of converted blocks
_BLOCK = 1 << 19  # weights that are converted at once: 2 MB in float32 stay in the cache
_HUGE_PAGE, _COLLAPSE = 2 << 20, 25  # bytes; MADV_COLLAPSE of Linux 6.1


class Product(ABC):
    """A product with the CPU weights of all layers that read the same input.

    Attributes:
        fewest: Rows that `multiply` computes at the least: it pads fewer ones, if they are not.
        weights: Weights, by their address, and biases as `models.bfloat16_loops` takes them; None:
            it does not. They are there as long as the product is.
    """

    fewest = 1
    weights: tuple[int, np.ndarray] | None = None

    def __init__(self, layers: list[nn.Linear]):
        self._bias = None
        if any(layer.bias is not None for layer in layers):
            none = layers[0].weight.new_zeros
            biases = [
                none(layer.out_features) if layer.bias is None else layer.bias for layer in layers
            ]
            self._bias = torch.cat(biases).detach()
        self.outputs, self._readers = sum(layer.out_features for layer in layers), len(layers)
        self._keep(torch.cat([layer.weight.detach() for layer in layers]))
        self._input = self._output = None
        self._left = 0  # readers that have not taken their part of this output

    @abstractmethod
    def _keep(self, weight: Tensor) -> None:
        """Store the weights [outputs, inputs]."""

    @abstractmethod
    def multiply(self, rows: Tensor) -> Tensor:
        """Return all layers' outputs [n, outputs] of rows [n, inputs]."""

    def __call__(self, input: Tensor) -> Tensor:
        """Return [..., all layers' outputs], computed when the first of the layers asks for it."""
        if input is not self._input:
            rows = input.reshape(-1, input.shape[-1])
            output = self.multiply(rows).view(*input.shape[:-1], -1)
            self._input, self._output, self._left = input, output, self._readers
        self._left -= 1
        output = self._output
        if not self._left:
            self._input = self._output = None
        return output


class PackedProduct(Product):
    """A product in bfloat16 with weights in oneDNN's layout."""

    fewest = 4  # one takes longer

    def _keep(self, weight: Tensor) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _USUAL)
        where = torch.ops.mkldnn.data_ptr(self._weight)
        _into_huge_pages(where, torch.ops.mkldnn._nbytes(self._weight))

    def multiply(self, rows: Tensor) -> Tensor:
        count = rows.shape[0]
        if count < self.fewest:
            rows = torch.constant_pad_nd(rows, (0, 0, 0, self.fewest - count))
        found = torch.ops.mkldnn._linear_pointwise(rows, self._weight, self._bias, "none", [], "")
        return found[:count]


class GroupedProduct(Product):
    """A product in bfloat16 by `models.bfloat16_loops`, with weights in the order it reads them."""

    def _keep(self, weight: Tensor) -> None:
        here, (outputs, inputs) = bfloat16_loops(), weight.shape
        assert here is not None  # as `products` has made sure
        self._product, self._odd = here.product, inputs % 2
        weight = F.pad(weight.detach(), (0, self._odd, 0, -outputs % here.GROUP))
        groups = weight.unflatten(0, (-1, here.GROUP)).unflatten(-1, (-1, 2)).transpose(1, 2)
        self._weight, added = bits(groups.contiguous()), np.zeros(len(weight), np.float32)
        if self._bias is not None:
            added[:outputs] = self._bias.float().numpy()
        self._given = self._weight.ctypes.data, added
        if not self._odd and len(added) == outputs:  # without padding
            self.weights = self._given
        _into_huge_pages(self._weight.ctypes.data, self._weight.nbytes)

    def multiply(self, rows: Tensor) -> Tensor:
        rows = F.pad(rows, (0, 1)) if self._odd else rows.detach().contiguous()
        found = rows.new_empty(len(rows), len(self._given[1]))
        compiled = loops()
        assert compiled is not None  # as `products` has made sure
        with pool(compiled) as threads:
            self._product(bits(rows), *self._given, bits(found), threads)
        return found if found.shape[1] == self.outputs else found[:, : self.outputs].contiguous()


class ConvertedProduct(Product):
    """A product in float32 with weights in 16 bits, which are converted block by block."""

    _scratch = threading.local()  # fresh memory for every block would cost more than the product

    def _keep(self, weight: Tensor) -> None:
        self._weight, self._bias = weight, None if self._bias is None else self._bias.float()

    def multiply(self, rows: Tensor) -> Tensor:
        outputs, inputs = self._weight.shape
        if len(rows) <= _MOST and self._weight.dtype == torch.bfloat16 and (here := loops()):
            found = rows.new_empty(len(rows), outputs)
            with pool(here) as threads:
                given = rows.detach().contiguous().numpy(), bits(self._weight), found.numpy()
                here.product(*given, threads)
            return found if self._bias is None else found.add_(self._bias)
        size = max(inputs, _BLOCK // inputs * inputs)
        block = getattr(self._scratch, "block", None)
        if block is None or block.numel() < size:
            with torch.inference_mode(False):  # for use in any mode
                block = self._scratch.block = torch.empty(size, dtype=torch.float32)
        parts = []
        for weight in self._weight.split(size // inputs):
            converted = block[: weight.numel()].view(weight.shape).copy_(weight)
            parts.append(F.linear(rows, converted))
        found = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        return found if self._bias is None else found.add_(self._bias)


def _into_huge_pages(address: int, size: int) -> None:
    """Ask the kernel for huge pages under so many bytes, if it can: reads are 15% faster."""
    if sys.platform != "linux":
        return
    madvise = ctypes.CDLL(None).madvise
    for page in range(address // _HUGE_PAGE, (address + size) // _HUGE_PAGE + 1):
        madvise(ctypes.c_void_p(page * _HUGE_PAGE), ctypes.c_size_t(_HUGE_PAGE), _COLLAPSE)


class PackedLinear(nn.Linear):
    """A linear layer that takes its part of a product; for inference only.

    Its first output is number `start` of the product's. With `keep` it keeps its unpacked weights
    too, for others that read them.
    """

    def __init__(self, layer: nn.Linear, product: Product, start: int, keep: bool):
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.stored = layer.weight.dtype
        self.weight = layer.weight if keep else nn.Parameter(layer.weight.new_empty(0), False)
        self.bias = layer.bias
        self.product, self.columns = product, slice(start, start + layer.out_features)
        self._of = [self.weight]  # in a list, or it would be a second parameter

    def forward(self, input: Tensor) -> Tensor:
        if self.weight is not self._of[0]:  # rows of it, in its place (`models.head.ReducedHead`)
            return F.linear(input, self.weight, self.bias)
        return self.product(input)[..., self.columns]


def product_of(parent: nn.Module, *names: str) -> Product | None:
    """Return the product of just these layers of a module, in this order; None: there is none."""
    layers = [getattr(parent, name, None) for name in names]
    found = [layer for layer in layers if isinstance(layer, PackedLinear)]
    if len(found) < len(layers):
        return None
    product, ends = found[0].product, [0, *(layer.columns.stop for layer in found)]
    own = [(layer.product, layer.columns.start) for layer in found]
    whole = own == [(product, start) for start in ends[:-1]] and ends[-1] == product.outputs
    return product if whole else None


def multiplies_bfloat16() -> bool:
    """Return whether this CPU has bfloat16 products (AVX-512, AMX) that this torch uses."""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def packs() -> bool:
    """Return whether this machine and torch have bfloat16 products with packed weights."""
    return multiplies_bfloat16() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def products(network: PreTrainedModel) -> dict[torch.dtype, type[Product]]:
    """Return the products, by the type of their weights, that are faster here than torch's."""
    found: dict[torch.dtype, type[Product]] = {}
    if bfloat16_loops() is not None and (multiplies_bfloat16() or _by_loops(network)):
        found[torch.bfloat16] = GroupedProduct
    elif packs():
        found[torch.bfloat16] = PackedProduct
    elif not multiplies_bfloat16():
        found[torch.bfloat16] = ConvertedProduct
    if not torch.ops.mkldnn._is_mkldnn_fp16_supported():
        found[torch.float16] = ConvertedProduct
    return found


def _by_loops(network: PreTrainedModel) -> bool:
    """Return whether a network multiplies in linear layers and grouped attention alone."""
    if network.config._attn_implementation != GROUPED:
        return False
    of = [m for m in network.modules() if isinstance(m, (nn.Linear, nn.Embedding, MarkovHead))]
    known = {id(weight) for module in of for weight in module.parameters()}
    return all(weight.dim() < 2 or id(weight) in known for weight in network.parameters())


def pack(network: PreTrainedModel) -> None:
    """Store a CPU network's 16-bit weights as its products read them fastest, in place.

    Where the CPU has no products of their type, the weights of linear layers stay in 16 bits and
    all else becomes float32. The network is for inference only: it can no longer be trained, moved
    or saved. The head keeps its own weights too, since the embedding may share them, and a Markov
    head is left as it is, since samplers read its rows.
    """
    devices = {parameter.device.type for parameter in network.parameters()}
    if devices != {"cpu"} or is_spread(network):
        return
    kinds, converts = products(network), False
    head = network.get_output_embeddings()
    for parent in [*network.modules()]:
        if isinstance(parent, MarkovHead):
            continue
        alone = {
            name: layer
            for name, layer in parent.named_children()
            if type(layer) is nn.Linear and layer.weight.dtype in kinds
        }
        groups: list[tuple[str, ...]] = [names for names in TOGETHER if alone.keys() >= {*names}]
        groups += [(name,) for name in alone if not any(name in names for names in groups)]
        for names in groups:
            layers, start = [alone[name] for name in names], 0
            kind = kinds[layers[0].weight.dtype]
            converts |= kind is ConvertedProduct
            product = kind(layers)
            for name, layer in zip(names, layers):
                setattr(parent, name, PackedLinear(layer, product, start, keep=layer is head))
                start += layer.out_features
    if converts:
        network.float()


def stored_in(network: PreTrainedModel) -> torch.dtype:
    """Return the type of a network's weights in memory; it may compute in another."""
    found = {m.stored for m in network.modules() if isinstance(m, PackedLinear)} - {network.dtype}
    return found.pop() if found else network.dtype


def precision(network: PreTrainedModel) -> str:
    """Return the type that a network computes in, and that of its weights where it is another."""
    computed, stored = _name(network.dtype), _name(stored_in(network))
    return computed if stored == computed else f"{computed}, weights in {stored}"


def told(network: PreTrainedModel) -> str:
    """Return a line on a network that computes in another type than its weights have, else ''."""
    computed, stored = _name(network.dtype), _name(stored_in(network))
    if stored == computed:
        return ""
    line = f"weights in {stored}, products in {computed}: this CPU has none in {stored}"
    if loops() is None and stored == "bfloat16":
        line += "; a token takes half of the time with: pip install 'parade[cpu]'"
    return line


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
