"""Hidden states of named decoder layers, taken from an ordinary forward of a causal LM.

A drafter that reads its target (DFlash, arXiv 2602.06036; EAGLE-3, arXiv 2503.01840) needs a few
layers of the same pass as the logits. `output_hidden_states=True` would keep every layer's output
at every pass; hooks keep only the named layers'. The input of the first layer, the embeddings, has
the number -1 (`EMBEDDINGS`).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

EMBEDDINGS = -1
READS_ONLY = "reads_only"  # of a hook that changes nothing, so layers on both sides run in one call


@contextmanager
def capture(network: PreTrainedModel, layers: Sequence[int]) -> Iterator[list[Tensor]]:
    """Capture the outputs of some decoder layers in a list, at each forward inside the context.

    Args:
        network: A causal LM whose decoder has its layers in `.layers` (Llama, Qwen, Mistral, ...).
        layers: 0-based indices i; state i is the *output* of decoder layer i, transformers'
            `hidden_states[i + 1]`. The last layer's is taken before the final norm (transformers'
            own after it). EMBEDDINGS is the input of layer 0.

    Yields:
        A list with one tensor [B, n, H] per layer, in the order of `layers`; empty before the first
        forward and replaced by each. Without layers nothing is hooked.
    """
    states: list[Tensor] = []
    modules = decoder_layers(network, [0 if i == EMBEDDINGS else i for i in layers])

    def keep(position: int, state: Tensor) -> None:
        if len(states) < len(modules):
            states.extend([None] * len(modules))
        states[position] = state

    def hook(position: int) -> RemovableHandle:
        def after(module: nn.Module, arguments: tuple, output: Tensor | tuple) -> None:
            keep(position, output[0] if isinstance(output, tuple) else output)

        def before(module: nn.Module, arguments: tuple, named: dict) -> None:
            keep(position, arguments[0] if arguments else named["hidden_states"])

        for function in (before, after):
            setattr(function, READS_ONLY, True)
        if layers[position] == EMBEDDINGS:
            return modules[position].register_forward_pre_hook(before, with_kwargs=True)
        return modules[position].register_forward_hook(after)

    hooks = [hook(position) for position in range(len(modules))]
    try:
        yield states
    finally:
        for handle in hooks:
            handle.remove()


def check_layers(network: PreTrainedModel, layers: Sequence[int]) -> None:
    """Raise ValueError for a state, by its number, that a causal LM does not have."""
    decoder_layers(network, [i for i in layers if i != EMBEDDINGS])


def decoder_layers(network: PreTrainedModel, layers: Sequence[int]) -> list[nn.Module]:
    """Return these decoder layers of a causal LM, 0-based; raise ValueError if it has not all."""
    if not layers:
        return []
    blocks = getattr(network.get_decoder(), "layers", None)
    if not isinstance(blocks, nn.ModuleList):
        raise ValueError(f"{type(network).__name__} has no list of decoder layers to read")
    for i in layers:
        if not 0 <= i < len(blocks):
            raise ValueError(
                f"layer {i} is not there: the network has layers 0 to {len(blocks) - 1}"
            )
    return [blocks[i] for i in layers]
