"""Block-wise masked diffusion LMs: stock causal LM classes under another attention.

A text is denoised block after block. `block_causal`: a block sees the blocks before it and itself;
`bidirectional`: every token sees the whole text, later blocks as masks included (LLaDA, arXiv
2502.09992). The logits at a place are about the token of that place, without a shift.
"""

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from models import diffusion, masks
from models.attention import attention_mask
from models.masks import Layout, Predicate

ATTENTION = ("block_causal", "bidirectional")
PUBLIC = {"llada": "bidirectional", "Dream": "bidirectional"}  # by model type
SHIFTED = ("Dream",)  # model types whose logits about a token stand at the place before it


def predicate_of(attention: str, span: int) -> Predicate:
    """The attention pattern of a kind, for blocks of `span` tokens."""
    if attention not in ATTENTION:
        raise ValueError(
            f"attention={attention!r} is not known: say how the model was trained, attention="
            f"{' or attention='.join(ATTENTION)}"
        )
    return getattr(masks, attention)(span)


def is_foreign(network: PreTrainedModel) -> bool:
    """True for a model of remote code: its attention is its own, and it may take no masks."""
    return not type(network).__module__.startswith("transformers.")


def foreign_logits(network: PreTrainedModel, texts: Tensor) -> Tensor:
    """Logits [B, W, V] of whole texts [B, W] by a foreign model."""
    logits = network(input_ids=texts).logits
    if network.config.model_type in SHIFTED:
        logits = torch.cat([logits[:, :1], logits[:, :-1]], 1)
    return logits


def from_causal_lm(
    source: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, weights: str
) -> PreTrainedModel:
    """A network of a causal LM's class and size, with a mask token.

    weights: 'copied', or 'random' to train from scratch.
    """
    if weights not in ("copied", "random"):
        raise ValueError(f"unknown weights {weights!r}. Choose from ['copied', 'random']")
    network = diffusion.from_causal_lm(source, tokenizer)
    if weights == "copied":
        return network
    kind = network.config._attn_implementation
    return AutoModelForCausalLM.from_config(network.config, attn_implementation=kind)


def denoised_logits(
    network: PreTrainedModel, batch: dict[str, Tensor], attention: str, span: int
) -> Tensor:
    """Logits [B, S, V] of the noised copy in rows of `data.corruption.noised_blocks`."""
    layout = Layout(batch["document"], batch["index"], batch["block"])
    mask = attention_mask(
        predicate_of(attention, span), layout, network.config._attn_implementation
    )
    return network(
        input_ids=batch["input_ids"],
        position_ids=batch["index"],
        attention_mask=mask,
        use_cache=False,
        logits_to_keep=batch["masked"].shape[1],
    ).logits
