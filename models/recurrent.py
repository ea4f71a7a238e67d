"""Causal LMs with layers that carry a recurrent state instead of keys and values."""

from transformers import PretrainedConfig

# Types of a text model whose forward goes on from any state with several tokens at once, as a draft
# needs it. Others of transformers' classes do not (bamba, jamba, recurrent_gemma), have caches of
# their own (minimax), or read no text in pieces (mamba, mamba2).
KNOWN = frozenset({"falcon_h1", "granitemoehybrid", "lfm2", "lfm2_moe", "nemotron_h", "olmo_hybrid",
                   "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "zamba2"})  # fmt: skip


def is_recurrent(config: PretrainedConfig) -> bool:
    """Return whether a model has recurrent layers that can be decoded with."""
    return config.get_text_config().model_type in KNOWN
