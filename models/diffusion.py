"""Masked-diffusion drafters made from causal LMs: copied weights, another attention mask.

The network remains the stock transformers class (of any Llama, Qwen2 or Qwen3 style checkpoint), so
every export loads in plain transformers. Only the attention mask and two added tokens make it a
drafter. There are three masks (`models.masks.DRAFTERS`). Under `prefix_causal` (`draft_blocks`) a
prefix can be cached, and shared by many draft blocks. Under `bidirectional` (`within_document`),
that of masked-diffusion models such as open-dCoder, the prefix attends to the block too, so every
block has a forward of its own. Under `causal`, that of PARD (arXiv 2504.18583), the drafter is an
ordinary causal LM that reads masks, as serving engines run it.
"""

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from models.attention import attention_mask
from models.head import ReducedHead
from models.masks import Layout, block_width, drafter_attention


def from_causal_lm(
    source: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    layers: list[int] | int | None = None,
) -> PreTrainedModel:
    """A drafter initialised with the weights of a causal LM.

    Args:
        source: the causal LM; not changed.
        tokenizer: one that has the draft tokens; the embedding is enlarged if it has too few rows
            (padded vocabularies often have enough).
        layers: decoder layers to keep, in this order; a number of them for those that `copying`
            chooses; None for all. Some layers of a deep model make a shallow drafter.

    Raises:
        ValueError: for a source that is not of a Llama-style class, or layers that it lacks.
    """
    vocabulary = len(tokenizer)
    if source.config.model_type == "xlnet" or not hasattr(source, "model"):
        raise ValueError(
            f"cannot make a drafter of a {source.config.model_type!r} model: "
            "a Llama, Qwen2 or Qwen3 style causal LM is needed"
        )
    network = copy.deepcopy(source)
    if isinstance(layers, int):
        layers = copying(source, layers)
        print(f"the drafter has layers {layers} of {source.config.num_hidden_layers}")
    if layers is not None:
        network = keep_layers(network, layers)
    if vocabulary > network.config.vocab_size:
        # New rows are random; a fixed seed makes them independent of the caller's random state.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            network.resize_token_embeddings(vocabulary, mean_resizing=True)
    return network


def copying(network: PreTrainedModel, count: int, rows: int = 4, length: int = 48) -> list[int]:
    """The first and the last layer of a causal LM, and those without which it copies worst.

    Answers repeat the names and phrases of their prompts. A model copies them by its induction
    heads (arXiv 2209.11895), which are in few layers, often in the middle of a deep model, and
    which training on some thousand answers does not grow in a drafter that begins without them
    (docs/results/small.md). So random tokens are read twice over, and a layer counts as much as
    the second reading loses without it: one forward for each layer.

    Args:
        network: The causal LM.
        count: Of the layers. One is the last.
        rows: Of random tokens.
        length: Tokens of a row, before they come again.

    Returns:
        The layers, 0-based, in their order.

    Raises:
        ValueError: The model has fewer layers.
    """
    depth = network.config.num_hidden_layers
    if not 1 <= count <= depth:
        raise ValueError(f"layers={count} is not allowed: the model has {depth}, give 1 to {depth}")
    ends = {depth - 1} if count == 1 else {0, depth - 1}
    if count <= len(ends):
        return sorted(ends)
    generator = torch.Generator().manual_seed(0)
    once = torch.randint(network.config.vocab_size, (rows, length), generator=generator)
    once = once.to(network.device)
    twice, lost = once.repeat(1, 2), {}
    for i in {*range(depth)} - ends:
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
    """A forward hook by which a decoder layer gives what it was given."""
    given = arguments[0] if arguments else named["hidden_states"]
    return (given, *output[1:]) if isinstance(output, tuple) else given


def keep_layers(network: PreTrainedModel, layers: list[int]) -> PreTrainedModel:
    """The network with only these decoder layers, in this order; changed in place.

    Raises:
        ValueError: for an empty list, a repeated layer, or one that the network lacks.
    """
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
    if getattr(network.config, "layer_types", None):
        network.config.layer_types = [network.config.layer_types[i] for i in layers]
    return network


def draft_logits(
    network: PreTrainedModel,
    batch: dict[str, Tensor],
    ids: Tensor | None = None,
    attention: str = "prefix_causal",
    shifted: bool = False,
) -> Tensor:
    """Logits of all drafted tokens of a training batch.

    Args:
        network: the drafter.
        batch: samples of `data.corruption.draft_blocks.DraftBlocks`.
        ids: [V], the tokens whose logits are wanted; None: all.
        attention: the drafter's, one of `models.masks.DRAFTERS`. 'bidirectional' costs A forwards
            of a row in place of one; 'causal' goes with samples of layout 'pard'.
        shifted: whether the output at a position predicts the token after it, as a causal LM's and
            open-dCoder's does, and not that position's own. Outputs of 'causal' always do.

    Returns:
        Logits [B, A, K, V].
    """
    B, A, K = batch["target"].shape
    width = block_width(attention, K)
    predicate, keep = drafter_attention(attention, span=K), A * width
    if attention == "bidirectional":
        batch, keep = blocks_apart(batch), width
    layout = Layout(batch["document"], batch["index"], batch["block"])
    logits = ReducedHead(network, ids)(
        input_ids=batch["input_ids"],
        position_ids=batch["position_ids"],
        attention_mask=attention_mask(predicate, layout, network.config._attn_implementation),
        use_cache=False,
        logits_to_keep=keep,
    )
    return logits.view(B, A, width, -1)[:, :, drafting(K, attention, shifted)]


def drafting(length: int, attention: str, shifted: bool) -> slice:
    """Of the tokens of a draft block in the drafter's input, those whose outputs draft it.

    Args:
        length: K, drafted tokens.
        attention: The drafter's, one of `models.masks.DRAFTERS`.
        shifted: Whether outputs predict the token after their position.
    """
    first = 0 if shifted or attention == "causal" else 1
    return slice(first, first + length)


def blocks_apart(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Packed draft blocks, laid out as a row for each block: its prefix and the block.

    Args:
        batch: B rows of S clean tokens and A blocks of 1 + K tokens each.

    Returns:
        input_ids, position_ids, document, index, block: [B A, S + 1 + K]. Clean tokens that are not
        of the block's prefix, and tokens that are not of the block, have document -1.
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
