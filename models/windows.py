"""Attention windows: layers that attend to so many last tokens only.

transformers' models take one mask for all of their layers, or a dictionary with one for each type
that their `layer_types` name.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from transformers import PreTrainedConfig

from models.masks import Predicate, chunked, sliding

FULL = "full_attention"
# Types of layers with a window, each with the key of a config that has its size, and its limit.
KINDS: dict[str, tuple[str, Callable[[int], Predicate]]] = {
    "sliding_attention": ("sliding_window", sliding),
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
