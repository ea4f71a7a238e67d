"""Causal LMs with layers that carry a recurrent state instead of keys and values."""

from transformers import PretrainedConfig

from models.windows import FULL, KINDS

# Types of a text model whose forward goes on from any state with several tokens at once, as a draft
# needs it. Others of transformers' classes do not (bamba, jamba, recurrent_gemma), have caches of
# their own (minimax), or read no text in pieces (mamba, mamba2).
KNOWN = frozenset({"falcon_h1", "granitemoehybrid", "lfm2", "lfm2_moe", "nemotron_h", "olmo_hybrid",
                   "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "zamba2"})  # fmt: skip


def is_recurrent(config: PretrainedConfig) -> bool:
    """Return whether a model has recurrent layers that can be decoded with."""
    known = config.get_text_config().model_type in KNOWN
    return known and len(attending(config)) < config.get_text_config().num_hidden_layers


def attending(config: PretrainedConfig) -> list[int]:
    """Return the layers, 0-based, that have keys and values and no recurrent state."""
    config = config.get_text_config()
    kinds = getattr(config, "layer_types", None) or [FULL] * config.num_hidden_layers
    return [i for i, kind in enumerate(kinds) if kind in (FULL, *KINDS)]
