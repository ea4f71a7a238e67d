"""Attention windows: layers that attend to so many last tokens only.

transformers' models take one mask for all of their layers, or a dictionary with one for each type
that their `layer_types` name.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from models.masks import Predicate, chunked, sliding

FULL, SLIDING = "full_attention", "sliding_attention"
# Types of layers with a window, each with the key of a config that has its size, and its limit.
KINDS: dict[str, tuple[str, Callable[[int], Predicate]]] = {
    SLIDING: ("sliding_window", sliding),
    "chunked_attention": ("attention_chunk_size", chunked),
}
Mask = TypeVar("Mask")


@dataclass(frozen=True)
class Windows:
    """The windows of a model's layers.

    Attributes:
        limits: The limit of each type of layer; None for a type without one.
        narrowest: Tokens of the smallest window; a text of so many has no limit in any layer.
        shared: Whether the model takes one mask for all layers.
    """

    limits: dict[str, Predicate | None]
    narrowest: int
    shared: bool

    def masks(self, make: Callable[[Predicate | None], Mask]) -> Mask | dict[str, Mask]:
        """Return the `attention_mask` that the model takes, of masks that `make` makes."""
        made = {kind: make(limit) for kind, limit in self.limits.items()}
        return next(iter(made.values())) if self.shared else made


def is_stock(config: PreTrainedConfig) -> bool:
    """Return whether a config is of transformers, and not of a repository's own code."""
    return type(config).__module__.startswith("transformers.")


def windows_of(config: PreTrainedConfig) -> Windows | None:
    """Return the windows of a model's layers; None where no layer has one.

    Raises:
        ValueError: The config names layers with a window and does not say how wide it is.
    """
    config = config.get_text_config()
    if not is_stock(config):  # nobody knows what its masks are: `models.context` ends its texts
        return None
    # A class without this key has one mask for all layers, whatever a file says.
    shared = not hasattr(type(config), "layer_types")
    if shared:
        kinds = {kind for kind, (key, _) in KINDS.items() if getattr(config, key, None) is not None}
    else:
        kinds = {*(config.layer_types or ())}
    longest = getattr(config, "max_position_embeddings", None)
    limits: dict[str, Predicate | None] = {}
    sizes = []
    for kind in sorted(kinds):
        limits[kind] = None
        if kind not in KINDS:
            continue
        key, limit = KINDS[kind]
        size = getattr(config, key, None)
        if not isinstance(size, int) or size < 1:
            raise ValueError(
                f"this {config.model_type!r} model has layers of {kind!r} and {key}={size}: its "
                "config must give the tokens of their window"
            )
        if longest is None or size < longest:
            limits[kind] = limit(size)
            sizes.append(size)
    return Windows(limits, min(sizes), shared) if sizes else None


def sliding_layers(window: int, layers: int) -> dict[str, Any]:
    """Return the keys of a Qwen config by which all layers have a window of so many tokens."""
    return {
        "use_sliding_window": True,
        "sliding_window": window,
        "max_window_layers": 0,
        "layer_types": [SLIDING] * layers,
    }


def with_window(network: PreTrainedModel, window: int) -> PreTrainedModel:
    """Return a causal LM with the same weights, whose layers all have a window of so many tokens.

    A Llama's becomes a Mistral's, which is a Llama with a window. Another class, or one whose
    weights a Mistral lacks, raises ValueError.
    """
    config = network.config
    keys = config.to_dict()
    if config.model_type in ("qwen2", "qwen3"):
        kind = config.model_type
        keys |= sliding_layers(window, config.num_hidden_layers)
    elif config.model_type in ("llama", "mistral") and not any(
        keys.get(key) for key in ("attention_bias", "mlp_bias")
    ):
        kind = "mistral"
        keys["sliding_window"] = window
    else:
        raise ValueError(
            f"network.window={window} is not allowed: layers of a {config.model_type!r} drafter "
            "cannot have a window of their own; those of llama (without biases), mistral, qwen2 "
            "and qwen3 can"
        )
    made, own = AutoConfig.for_model(kind), ("model_type", "architectures", "transformers_version")
    known = {key: x for key, x in keys.items() if key not in own and hasattr(made, key)}
    with torch.random.fork_rng(devices=[]):  # weights that are replaced
        again = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(kind, **known),
            dtype=network.dtype,
            attn_implementation=config._attn_implementation,
        )
    again.load_state_dict(network.state_dict())
    again.generation_config = network.generation_config
    return again.to(network.device).train(network.training)
