"""Linear layers with packed weights, for decoding on a CPU.

A decoding pass has few tokens, so it waits for memory: it reads every weight once. oneDNN reads
them faster in its own blocked layout and in larger pieces, so layers that read the same input are
one product. The 210 layers of SmolLM2, one token, one thread: 31 ms plain, 19 packed, 14 as
120 products with the input padded to four rows.
"""

import ctypes
import sys

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from models.placement import is_spread

# Layers of one parent that read the same input, by the names that transformers' models give them.
TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_FEWEST = 4  # rows: the kernel takes longer for one than for four
_USUAL = 32  # rows that the layout is chosen for
_HUGE_PAGE, _COLLAPSE = 2 << 20, 25  # bytes; MADV_COLLAPSE of Linux 6.1


class PackedProduct:
    """A product with the bfloat16 CPU weights of all layers that read the same input."""

    def __init__(self, layers: list[nn.Linear]):
        weight = torch.cat([layer.weight.detach() for layer in layers])
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _USUAL)
        _into_huge_pages(self._weight)
        self._bias = None
        if any(layer.bias is not None for layer in layers):
            none = weight.new_zeros
            biases = [
                none(layer.out_features) if layer.bias is None else layer.bias for layer in layers
            ]
            self._bias = torch.cat(biases).detach()
        self._readers = len(layers)
        self._input = self._output = None
        self._left = 0  # readers that have not taken their part of this output

    def __call__(self, input: Tensor) -> Tensor:
        """Return [..., all layers' outputs], computed when the first of the layers asks for it."""
        if input is not self._input:
            self._input, self._output, self._left = input, self._product(input), self._readers
        self._left -= 1
        output = self._output
        if not self._left:
            self._input = self._output = None
        return output

    def _product(self, input: Tensor) -> Tensor:
        rows = input.reshape(-1, input.shape[-1])
        count = rows.shape[0]
        if count < _FEWEST:
            rows = torch.constant_pad_nd(rows, (0, 0, 0, _FEWEST - count))
        found = torch.ops.mkldnn._linear_pointwise(rows, self._weight, self._bias, "none", [], "")
        return found[:count].view(*input.shape[:-1], -1)


def _into_huge_pages(packed: Tensor) -> None:
    """Ask the kernel for huge pages under packed weights, if it can: reads are 15% faster."""
    if sys.platform != "linux":
        return
    first = torch.ops.mkldnn.data_ptr(packed) // _HUGE_PAGE
    last = (torch.ops.mkldnn.data_ptr(packed) + torch.ops.mkldnn._nbytes(packed)) // _HUGE_PAGE
    madvise = ctypes.CDLL(None).madvise
    for page in range(first, last + 1):
        madvise(ctypes.c_void_p(page * _HUGE_PAGE), ctypes.c_size_t(_HUGE_PAGE), _COLLAPSE)


class PackedLinear(nn.Linear):
    """A linear layer that takes its part of a packed product; for inference only.

    Its first output is number `start` of the product's. With `keep` it keeps its unpacked weights
    too, for others that read them.
    """

    def __init__(self, layer: nn.Linear, product: PackedProduct, start: int, keep: bool):
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight = layer.weight if keep else nn.Parameter(layer.weight.new_empty(0), False)
        self.bias = layer.bias
        self._product, self._columns = product, slice(start, start + layer.out_features)
        self._of = [self.weight]  # in a list, or it would be a second parameter

    def forward(self, input: Tensor) -> Tensor:
        if self.weight is not self._of[0]:  # rows of it, in its place (`models.head.ReducedHead`)
            return F.linear(input, self.weight, self.bias)
        return self._product(input)[..., self._columns]


def multiplies_bfloat16() -> bool:
    """Return whether this CPU has bfloat16 products (AVX-512, AMX) that this torch uses."""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def packs() -> bool:
    """Return whether this machine and torch have bfloat16 products with packed weights."""
    return multiplies_bfloat16() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def pack(network: PreTrainedModel) -> None:
    """Pack the bfloat16 weights of a CPU network's linear layers, in place, for inference only.

    They can no longer be trained, moved or saved. The head keeps its unpacked weights too, since
    the embedding may share them.
    """
    devices = {parameter.device.type for parameter in network.parameters()}
    if devices != {"cpu"} or is_spread(network) or not packs():
        return
    head = network.get_output_embeddings()
    for parent in [*network.modules()]:
        alone = {
            name: layer
            for name, layer in parent.named_children()
            if type(layer) is nn.Linear and layer.weight.dtype == torch.bfloat16
        }
        groups: list[tuple[str, ...]] = [names for names in TOGETHER if alone.keys() >= {*names}]
        groups += [(name,) for name in alone if not any(name in names for names in groups)]
        for names in groups:
            layers, start = [alone[name] for name in names], 0
            product = PackedProduct(layers)
            for name, layer in zip(names, layers):
                setattr(parent, name, PackedLinear(layer, product, start, keep=layer is head))
                start += layer.out_features
