"""Hidden states of named decoder layers, taken from an ordinary forward of a causal LM.

A drafter that reads its target (DFlash, arXiv 2602.06036; EAGLE-3, arXiv 2503.01840) needs a few
layers of the very pass that gives the logits. Asking the model for all layers
(`output_hidden_states=True`) keeps every layer's output alive and, in decoding, at every pass;
hooks on the named layers keep those alone.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn
from transformers import PreTrainedModel


@contextmanager
def capture(network: PreTrainedModel, layers: Sequence[int]) -> Iterator[list[Tensor]]:
    """A context whose list holds the outputs of some decoder layers after each forward in it.

    Args:
        network: A causal LM whose decoder has its layers in `.layers` (Llama, Qwen, Mistral, ...).
        layers: 0-based indices i; state i is the *output* of decoder layer i, which transformers
            counts as `hidden_states[i + 1]`. That of the last layer is taken before the final norm
            (transformers' own last entry is taken after it).

    Yields:
        A list with one tensor [B, n, H] a layer, in the order of `layers`; empty before the first
        forward. A further forward replaces them. Without layers nothing is hooked.

    Raises:
        ValueError: A layer that the network does not have, or no such decoder.
    """
    states: list[Tensor] = []
    modules = [decoder_layer(network, i) for i in layers]

    def keep(position: int):
        def hook(module: nn.Module, arguments: tuple, output: Tensor | tuple) -> None:
            if len(states) < len(modules):
                states.extend([None] * len(modules))
            states[position] = output[0] if isinstance(output, tuple) else output

        return hook

    hooks = [module.register_forward_hook(keep(n)) for n, module in enumerate(modules)]
    try:
        yield states
    finally:
        for hook in hooks:
            hook.remove()


def check_layers(network: PreTrainedModel, layers: Sequence[int]) -> None:
    """Check that a network has some decoder layers.

    Args:
        network: A causal LM.
        layers: 0-based indices.

    Raises:
        ValueError: A layer that the network does not have, or no list of decoder layers.
    """
    for i in layers:
        decoder_layer(network, i)


def decoder_layer(network: PreTrainedModel, i: int) -> nn.Module:
    """Decoder layer i of a causal LM, 0-based.

    Raises:
        ValueError: The network does not have it, or no list of decoder layers.
    """
    blocks = getattr(network.get_decoder(), "layers", None)
    if not isinstance(blocks, nn.ModuleList):
        raise ValueError(f"{type(network).__name__} has no list of decoder layers to read")
    if not 0 <= i < len(blocks):
        raise ValueError(f"layer {i} is not there: the network has layers 0 to {len(blocks) - 1}")
    return blocks[i]
