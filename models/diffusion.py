"""Masked-diffusion drafters made from causal LMs: weights copied, attention changed.

The network stays the stock transformers class (any Llama, Qwen2 or Qwen3 style checkpoint); what
makes it a drafter is the attention pattern that it is trained and run with
(`models.masks.draft_blocks`) and two more tokens, so every export loads in plain transformers.
"""

import copy

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from models.attention import attention_mask
from models.masks import Layout, draft_blocks


def from_causal_lm(
    source: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, layers: list[int] | None = None
) -> PreTrainedModel:
    """A drafter with the weights of a causal LM.

    tokenizer: with mask and separator; the embedding grows where it is smaller (padded
    vocabularies often have room already). layers: which decoder layers to keep, in this order
    (None: all): a shallow drafter that starts from some of a deep model's layers.
    """
    vocabulary = len(tokenizer)
    if source.config.model_type == "xlnet" or not hasattr(source, "model"):
        raise ValueError(
            f"cannot make a drafter of a {source.config.model_type!r} model: "
            "a Llama, Qwen2 or Qwen3 style causal LM is needed"
        )
    network = copy.deepcopy(source)
    if layers is not None:
        network = keep_layers(network, layers)
    if vocabulary > network.config.vocab_size:
        with torch.random.fork_rng(devices=[]):  # the new rows must not depend on the caller
            torch.manual_seed(0)
            network.resize_token_embeddings(vocabulary, mean_resizing=True)
    return network


def keep_layers(network: PreTrainedModel, layers: list[int]) -> PreTrainedModel:
    """Keep these decoder layers of a network, in this order."""
    depth = network.config.num_hidden_layers
    if not layers or any(not 0 <= i < depth for i in layers) or len({*layers}) < len(layers):
        raise ValueError(
            f"layers={layers} are not different layers of a model that has 0 to {depth - 1}"
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


def draft_logits(network: PreTrainedModel, batch: dict[str, Tensor]) -> Tensor:
    """Logits [B, A, K, V] of every drafted token (see `data.corruption.draft_blocks`)."""
    layout = Layout(batch["document"], batch["index"], batch["block"])
    B, A, K = batch["target"].shape
    logits = network(
        input_ids=batch["input_ids"],
        position_ids=batch["position_ids"],
        attention_mask=attention_mask(draft_blocks, layout, network.config._attn_implementation),
        use_cache=False,
        logits_to_keep=A * (1 + K),
    ).logits
    return logits.view(B, A, 1 + K, -1)[:, :, 1:]
