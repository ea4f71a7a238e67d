"""Block-wise masked diffusion LMs: stock causal LM classes with another attention mask.

A text is denoised block by block. With `block_causal` a block attends to earlier blocks and itself;
with `bidirectional` every token attends to the whole text, with later blocks still masked (LLaDA,
arXiv 2502.09992). The logits at a position predict its own token, or, where they are shifted as in
the causal LM that the model was made from (Dream), the token after it.
"""

from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from models import masks
from models.attention import masked_inputs
from models.masks import Predicate

ATTENTION = ("block_causal", "bidirectional")
PUBLIC = {"llada": "bidirectional", "Dream": "bidirectional"}  # by model type
SHIFTED = ("Dream",)  # model types whose logits at a position predict the token after it


def predicate_of(attention: str, span: int) -> Predicate:
    """Return the attention pattern, one of `ATTENTION`, of an LM with `span` tokens per block."""
    if attention not in ATTENTION:
        raise ValueError(
            f"attention={attention!r} is not known: say how the model was trained, attention="
            f"{' or attention='.join(ATTENTION)}"
        )
    return getattr(masks, attention)(span)


def is_foreign(network: PreTrainedModel) -> bool:
    """Return True for a class from remote code, which may not support custom attention masks."""
    return not type(network).__module__.startswith("transformers.")


def told(config: PreTrainedConfig) -> dict:
    """Return the options of `denoise` that a configuration determines.

    A public checkpoint's (`models.public`) determines all; that of remote code only has a model
    type, which gives attention and shift.
    """
    if denoising := getattr(config, "denoising", None):
        return dict(denoising)
    known = {"mask_id": getattr(config, "mask_token_id", None)}
    known["attention"] = PUBLIC.get(config.model_type)
    known["shifted"] = config.model_type in SHIFTED
    return {key: value for key, value in known.items() if value is not None}


def denoised_logits(
    network: PreTrainedModel, batch: dict[str, Tensor], attention: str, span: int
) -> Tensor:
    """Return logits [B, S, V] of the noised tokens of a training batch.

    `batch` has samples of `data.corruption.noised_blocks`, `attention` is one of `ATTENTION`, and a
    block has `span` tokens.
    """
    inputs = masked_inputs(network, batch, predicate_of(attention, span))
    return network(**inputs, logits_to_keep=batch["masked"].shape[1]).logits
