"""The text part of a model that reads images or sound too, as an ordinary causal LM.

A text prompt needs no other part. The class is that of the text part's own configuration, so its
layers can be copied into a drafter, and what is copied loads in stock transformers.
"""

from collections.abc import Mapping
from typing import Any

from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

# Types of text parts that have no causal LM of their own, with the one that they are on texts: of
# a text token the three positions of a multimodal rotary embedding are one. (Not qwen3_vl_moe's,
# whose files have the experts' matrices the other way round.)
SAME = {
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
}
PREFIX = {"paligemma"}  # whose prompts attend to themselves in both directions
PARTS = "language_model", "text_model"  # names of a text part in its whole
# From the names in files, old and new, to those of a causal LM.
_HEAD = {r"^(?:model\.)?(?:language_model|text_model)\.lm_head\.": "lm_head."}
_REST = {r"^(?:model\.)?(?:language_model|text_model)\.(?:model\.)?": "model."}


def text_part(path: str, stored: Mapping[str, Any], **hub) -> dict[str, Any] | None:
    """Return arguments of `from_pretrained` that load the text part of a model, with its `config`.

    None for a model that is no composite, or that transformers loads as a causal LM itself.

    Args:
        path: A folder or Hub id.
        stored: Its config.json.
        **hub: Options of the Hub.

    Raises:
        ValueError: The text part is no causal LM of transformers.
    """
    name = stored.get("model_type")
    if name not in CONFIG_MAPPING or "text_config" not in CONFIG_MAPPING[name].sub_configs:
        return None
    whole = AutoConfig.from_pretrained(path, trust_remote_code=False, **hub)
    text = whole.get_text_config()
    if text.model_type in SAME:
        text = _same(text)
    if name in PREFIX:
        raise ValueError(
            f"a {name!r} model is not decoded with: tokens of its prompts attend to later ones, as "
            "in no causal LM. Give another model, such as gemma3, mistral3 or qwen3_vl"
        )
    decodes = type(text) in MODEL_FOR_CAUSAL_LM_MAPPING
    if decodes and not (whole.is_encoder_decoder or text.is_encoder_decoder):
        # The head belongs to the whole, which says what it is tied to.
        text.tie_word_embeddings = whole.tie_word_embeddings
        text.dtype = whole.dtype or text.dtype
        return {"config": text, "key_mapping": _HEAD | _REST}
    if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return None
    raise ValueError(
        f"transformers has no causal LM for the text part ({text.model_type!r}) of a {name!r} "
        "model: give a model whose text part has one, such as gemma3, mistral3 or qwen3_vl"
    )


def _same(text: PreTrainedConfig) -> PreTrainedConfig:
    """Return the configuration of the causal LM that a text part of `SAME` is on texts."""
    kind = CONFIG_MAPPING[SAME[text.model_type]]
    known, keys = kind().to_dict(), text.to_dict()
    given = {key: keys[key] for key in keys.keys() & known.keys() - {"model_type"}}
    rotary = given.get("rope_parameters") or {}
    given["rope_parameters"] = {k: v for k, v in rotary.items() if not k.startswith("mrope")}
    return kind(**given)


def without_other_parts(network: PreTrainedModel, found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the loading info of a text part, without the keys of the other parts.

    `found` is that of `from_pretrained(..., output_loading_info=True)`.
    """
    own = {"lm_head", *PARTS, *(name for name, _ in network.base_model.named_children())}
    prefix = f"{network.base_model_prefix}."
    keys = {k for k in found["unexpected_keys"] if k.removeprefix(prefix).split(".")[0] in own}
    return {**found, "unexpected_keys": keys}
