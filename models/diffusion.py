"""Masked-diffusion drafters made from causal LMs: copied weights, another attention mask.

The network remains the stock transformers class (of any Llama, Qwen2 or Qwen3 style checkpoint), so
every export loads in plain transformers. Only two added tokens and the attention mask
(`models.masks.DRAFTERS`) make it a drafter. With `prefix_causal` (`draft_blocks`) a prefix can be
cached and shared by many draft blocks. With `bidirectional` (`within_document`), as in open-dCoder,
the prefix attends to the block too, so every block has its own forward. With `causal`, as in PARD
(arXiv 2504.18583), it is an ordinary causal LM that reads masks, as serving engines run it.
"""

import copy
import time
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from models.attention import masked_inputs
from models.head import ReducedHead
from models.masks import drafter_attention
from models.recurrent import attending, is_recurrent
from models.sizes import Layers, Window
from models.windows import with_window
from terminal.progress import track

PER_LAYER = ("layer_types", "mlp_layer_types", "no_rope_layers")  # keys with an entry per layer
KIND = ("layer_type", "attention_type", "is_sliding", "sliding_window", "use_rope")


class Copied(NamedTuple):
    """The layers of its source that a new drafter begins with: the drafter's attribute `copied`.

    Attributes:
        layers: Their numbers, in the drafter's order.
        seconds: The time that their choice took.
    """

    layers: list[int]
    seconds: float


def from_causal_lm(
    source: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    layers: list[Layers] | Layers | None = None,
    window: Window | None = None,
) -> PreTrainedModel:
    """Return a drafter initialised with the weights of a causal LM.

    Args:
        source: A Llama-style causal LM; not changed.
        tokenizer: Has the draft tokens; the embedding is enlarged if it has too few rows (padded
            vocabularies often have enough).
        layers: Decoder layers to keep, in this order, or a number of them, which `copying` chooses;
            None for all. Some layers of a deep model make a shallow drafter.
        window: Last tokens that its layers attend to (`models.windows.with_window`); None: as in
            the source.
    """
    vocabulary = len(tokenizer)
    layers_of: Any = getattr(getattr(source, "model", None), "layers", None)
    depth = source.config.get_text_config().num_hidden_layers
    # LongCat-Flash counts each of its modules twice.
    if not isinstance(layers_of, nn.ModuleList) or len(layers_of) != depth:
        raise ValueError(
            f"cannot make a drafter of a {source.config.model_type!r} model: "
            "a Llama, Qwen2 or Qwen3 style causal LM is needed"
        )
    network = copy.deepcopy(source)
    recurrent, began = is_recurrent(source.config), time.perf_counter()
    if isinstance(layers, int):
        layers = copying(source, layers)
        why = " (those with recurrent states cannot draft blocks)" if recurrent else ""
        print(f"the drafter has layers {layers} of {source.config.num_hidden_layers}{why}")
    elif recurrent and {*(layers or [-1])} - {*attending(source.config)}:
        raise ValueError(
            f"layers={layers} is not allowed: layers with a recurrent state cannot draft blocks. "
            f"Choose from {attending(source.config)}"
        )
    if layers is not None:
        network.copied = Copied([*layers], time.perf_counter() - began)
        network = keep_layers(network, layers)
    if window is not None:
        network = with_window(network, window)
    if vocabulary > network.config.vocab_size:
        # New rows are random; a fixed seed makes them independent of the caller's random state.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            network.resize_token_embeddings(vocabulary, mean_resizing=True)
    return network


def copying(network: PreTrainedModel, count: int, rows: int = 4, length: int = 48) -> list[int]:
    """Return `count` layers of an LM: the last, the first, and those that copying needs most.

    Answers repeat names and phrases of their prompts. A model copies them with its induction heads
    (arXiv 2209.11895). These are in few layers, often in the middle, and a drafter that begins
    without them does not grow them from some thousand answers (docs/lab_notes/small.md). So `rows`
    sequences of `length` random tokens are read twice over, and a layer's score is the loss of the
    second reading without it: one forward per layer.
    """
    able = attending(network.config)
    if not 1 <= count <= len(able):
        those = " without a recurrent state" if is_recurrent(network.config) else ""
        give = f", give 1 to {len(able)}" if able else ", and others cannot draft blocks"
        raise ValueError(f"layers={count} is not allowed: the model has {len(able)}{those}{give}")
    ends = {able[-1]} if count == 1 else {able[0], able[-1]}
    if count <= len(ends):
        return sorted(ends)
    generator = torch.Generator().manual_seed(0)
    once = torch.randint(network.config.vocab_size, (rows, length), generator=generator)
    once = once.to(network.device)
    twice, lost = once.repeat(1, 2), {}
    for i in track(sorted({*able} - ends), "choice of layers", unit="layers"):
        hook = network.model.layers[i].register_forward_hook(_pass_by, with_kwargs=True)
        try:
            with torch.inference_mode():
                logits = network(twice, use_cache=False, logits_to_keep=length).logits
        finally:
            hook.remove()
        lost[i] = functional.cross_entropy(logits[:, :-1].mT.float(), once[:, 1:]).item()
    most = sorted(lost, key=lost.__getitem__, reverse=True)
    return sorted([*ends, *most[: count - len(ends)]])


def _pass_by(layer: nn.Module, arguments: tuple, named: dict, output: Tensor | tuple):
    """Return a forward hook that makes a decoder layer return its input."""
    given = arguments[0] if arguments else named["hidden_states"]
    return (given, *output[1:]) if isinstance(output, tuple) else given


def keep_layers(network: PreTrainedModel, layers: list[int]) -> PreTrainedModel:
    """Keep only these decoder layers, in this order, in place, and return the network."""
    depth = network.config.num_hidden_layers
    if not layers or any(not 0 <= i < depth for i in layers) or len({*layers}) < len(layers):
        raise ValueError(
            f"layers={layers} is not allowed: give different layers of the model, 0 to {depth - 1}"
        )
    kept = [network.model.layers[i] for i in layers]
    for new, layer in enumerate(kept):
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = new
    network.model.layers = nn.ModuleList(kept)
    network.config.num_hidden_layers = len(kept)
    for key in PER_LAYER:
        if entries := getattr(network.config, key, None):
            setattr(network.config, key, [entries[i] for i in layers])
    with torch.device("meta"):
        again = type(network)(copy.deepcopy(network.config))
    for i, ours, theirs in zip(layers, network.model.layers, again.model.layers):
        if _kind(ours) != _kind(theirs):
            raise ValueError(
                f"layers={layers} is not allowed: layer {i} would be of another kind in the "
                f"drafter, as a {network.config.model_type!r} config gives kinds by number"
            )
    return network


def _kind(layer: nn.Module) -> tuple[dict, list]:
    """Return all by which the layers of a model differ that have the same class."""
    sizes = {name: x.shape for name, x in layer.state_dict().items()}
    return sizes, [getattr(m, key, None) for m in layer.modules() for key in KIND]


def draft_logits(
    network: PreTrainedModel,
    batch: dict[str, Tensor],
    ids: Tensor | None = None,
    attention: str = "prefix_causal",
    shifted: bool = False,
) -> Tensor:
    """Return the logits [B, A, K, V] of all drafted tokens of a training batch.

    Args:
        network: The drafter.
        batch: Samples of `data.corruption.draft_blocks.DraftBlocks`.
        ids: [V], the tokens whose logits are computed; None for all.
        attention: One of `models.masks.DRAFTERS`. 'bidirectional' costs A forwards of a row instead
            of one; 'causal' needs samples of layout 'pard'.
        shifted: Whether the output at a position predicts the token after it, as a causal LM's and
            open-dCoder's does; outputs of 'causal' always do.
    """
    B, A, K = batch["target"].shape
    anchored = attention == "causal"  # the last committed token drafts the first one
    width, first = (K, 0) if anchored else (1 + K, 0 if shifted else 1)
    predicate, keep = drafter_attention(attention, span=K), A * width
    if attention == "bidirectional":
        batch, keep = blocks_apart(batch), width
    inputs = masked_inputs(network, batch, predicate)
    logits = ReducedHead(network, ids)(**inputs, logits_to_keep=keep)
    return logits.view(B, A, width, -1)[:, :, first : first + K]


def blocks_apart(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return packed draft blocks as a row [S + 1 + K] per block: its prefix and the block.

    Clean tokens after the prefix, and block tokens that are padding, have document -1. A row of
    `batch` has S clean tokens and A blocks of 1 + K tokens.
    """
    B, A, K = batch["target"].shape
    S = batch["input_ids"].shape[1] - A * (1 + K)
    names = ("input_ids", "position_ids", "document", "index", "block")
    clean = {name: batch[name][:, None, :S].expand(B, A, S) for name in names}
    own = {name: batch[name][:, S:].view(B, A, 1 + K) for name in names}
    before = clean["index"] < own["index"][..., :1]
    prefix = before & (clean["document"] == own["document"][..., :1])
    clean["document"] = clean["document"].masked_fill(~prefix, -1)
    return {name: torch.cat([clean[name], own[name]], 2).flatten(0, 1) for name in names}
