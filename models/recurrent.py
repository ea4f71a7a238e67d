"""Causal LMs with layers that carry a recurrent state instead of keys and values."""

from transformers import PretrainedConfig

from models.windows import FULL, KINDS

# Types of a text model whose forward goes on from any state, with one token or with several, as a
# draft needs it. Of transformers' other classes some do not with several (bamba, jamba,
# recurrent_gemma), some give other numbers for one token than for the whole text (nemotron_h and
# zamba2, by up to 0.16), have caches of their own (minimax) or read no pieces (mamba, mamba2).
KNOWN = frozenset({"falcon_h1", "granitemoehybrid", "lfm2", "lfm2_moe", "olmo_hybrid",
                   "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"})  # fmt: skip


def is_recurrent(config: PretrainedConfig) -> bool:
    """Return whether a model has recurrent layers that can be decoded with."""
    known = config.get_text_config().model_type in KNOWN
    return known and len(attending(config)) < config.get_text_config().num_hidden_layers


def attending(config: PretrainedConfig) -> list[int]:
    """Return the layers, 0-based, that have keys and values and no recurrent state."""
    config = config.get_text_config()
    kinds = getattr(config, "layer_types", None) or [FULL] * config.num_hidden_layers
    return [i for i, kind in enumerate(kinds) if kind in (FULL, *KINDS)]
