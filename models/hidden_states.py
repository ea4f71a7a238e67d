"""Hidden states of named decoder layers, taken from an ordinary forward of a causal LM.

A drafter that reads its target (DFlash, arXiv 2602.06036; EAGLE-3, arXiv 2503.01840) needs a few
layers of the same pass as the logits. `output_hidden_states=True` would keep every layer's output
at every pass; hooks keep only the named layers'.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn
from transformers import PreTrainedModel


@contextmanager
def capture(network: PreTrainedModel, layers: Sequence[int]) -> Iterator[list[Tensor]]:
    """Capture the outputs of some decoder layers in a list, at each forward inside the context.

    Args:
        network: A causal LM whose decoder has its layers in `.layers` (Llama, Qwen, Mistral, ...).
        layers: 0-based indices i; state i is the *output* of decoder layer i, transformers'
            `hidden_states[i + 1]`. The last layer's is taken before the final norm (transformers'
            own after it).

    Yields:
        A list with one tensor [B, n, H] per layer, in the order of `layers`; empty before the first
        forward and replaced by each. Without layers nothing is hooked.
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
    """Raise ValueError for a decoder layer, 0-based, that a causal LM does not have."""
    for i in layers:
        decoder_layer(network, i)


def decoder_layer(network: PreTrainedModel, i: int) -> nn.Module:
    """Return decoder layer i of a causal LM, 0-based; raise ValueError if it has none."""
    blocks = getattr(network.get_decoder(), "layers", None)
    if not isinstance(blocks, nn.ModuleList):
        raise ValueError(f"{type(network).__name__} has no list of decoder layers to read")
    if not 0 <= i < len(blocks):
        raise ValueError(f"layer {i} is not there: the network has layers 0 to {len(blocks) - 1}")
    return blocks[i]
