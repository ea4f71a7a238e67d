"""Block-wise masked diffusion LMs: stock causal LM classes with another attention mask.

A text is denoised block by block. `block_causal`: a block attends to earlier blocks and itself;
`bidirectional`: every token attends to the whole text, with later blocks still masked (LLaDA, arXiv
2502.09992). The logits at a position predict the token of that position; those of models made from
causal LMs without that change (Dream) are shifted: they predict the token after it.
"""

from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from models import diffusion, masks
from models.attention import attention_mask
from models.masks import Layout, Predicate

ATTENTION = ("block_causal", "bidirectional")
PUBLIC = {"llada": "bidirectional", "Dream": "bidirectional"}  # by model type
SHIFTED = ("Dream",)  # model types whose logits at a position predict the token after it


def predicate_of(attention: str, span: int) -> Predicate:
    """The attention pattern of a block-wise diffusion LM.

    Args:
        attention: one of `ATTENTION`.
        span: tokens per block.

    Raises:
        ValueError: for another attention.
    """
    if attention not in ATTENTION:
        raise ValueError(
            f"attention={attention!r} is not known: say how the model was trained, attention="
            f"{' or attention='.join(ATTENTION)}"
        )
    return getattr(masks, attention)(span)


def is_foreign(network: PreTrainedModel) -> bool:
    """True for a model class from remote code, which may not support custom attention masks."""
    return not type(network).__module__.startswith("transformers.")


def told(config: PreTrainedConfig) -> dict:
    """What a configuration tells of how its model is decoded: knobs of `denoise`, some of them.

    That of a public checkpoint (`models.public`) tells all of them; that of a model of remote code
    tells its type, from which attention and shift follow.
    """
    if denoising := getattr(config, "denoising", None):
        return dict(denoising)
    known = {"mask_id": getattr(config, "mask_token_id", None)}
    known["attention"] = PUBLIC.get(config.model_type)
    known["shifted"] = config.model_type in SHIFTED
    return {key: value for key, value in known.items() if value is not None}


def from_causal_lm(
    source: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, weights: str
) -> PreTrainedModel:
    """A network of a causal LM's class and size, with an embedding for the mask token.

    Args:
        source: the causal LM; not changed.
        tokenizer: one that has a mask token.
        weights: 'copied' from the source, or 'random' to train from scratch.

    Raises:
        ValueError: for other `weights`, or a source that is not of a Llama-style class.
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
    """Logits of the noised tokens of a training batch.

    Args:
        network: a transformers causal LM.
        batch: samples of `data.corruption.noised_blocks`.
        attention: one of `ATTENTION`.
        span: tokens per block.

    Returns:
        Logits [B, S, V].
    """
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
