"""The most tokens of a text that a network reads as it was trained to.

Two kinds of rotary embeddings choose their frequencies from the highest position of a forward, over
all rows of its batch: longrope and dynamic NTK. Beyond their first range a token's result would
depend on the other rows, on how a prompt is cut and on how long a draft is, so a text ends there.
"""

from functools import partial

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from models.windows import is_stock


def context(config: PreTrainedConfig) -> int | None:
    """Return the most tokens of a text; None: any number."""
    config = _of_texts(config)
    keys = ["max_position_embeddings", "max_sequence_length"]  # the 2nd is LLaDA's
    if not is_stock(config):  # its layers may not follow our masks of a window
        keys.append("sliding_window")
    limits = *(getattr(config, key, None) for key in keys), rotary_range(config)[0]
    known = [n for n in limits if n is not None and n > 0]
    return min(known, default=None)  # XLNet says -1


def rotary_range(config: PreTrainedConfig) -> tuple[int | None, str]:
    """Return how many positions have one set of rotary frequencies, and the rotary type.

    (None, '') where the frequencies never depend on the pass.
    """
    config = _of_texts(config)
    whole = _rotary(config)
    # One for all layers, or one for each type of layer.
    parts = [part for part in whole.values() if isinstance(part, dict)] or [whole]
    longest = getattr(config, "max_position_embeddings", None)
    found: list[tuple[int, str]] = []
    for part in parts:
        kind = str(part.get("rope_type") or part.get("type"))
        limit = longest if "dynamic" in kind else None
        if kind == "longrope":
            own = getattr(config, "original_max_position_embeddings", None)
            limit = part.get("original_max_position_embeddings") or own or longest
        if limit:
            found.append((limit, kind))
    return min(found, default=(None, ""))


def _of_texts(config: PreTrainedConfig) -> PreTrainedConfig:
    found = config.get_text_config()
    return found if isinstance(found, PreTrainedConfig) else config  # MAR's decoder is a dict


def _rotary(config: PreTrainedConfig) -> dict:
    return getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}


def most_positions(config: PreTrainedConfig) -> int | None:
    """Return how many positions a pass may have: `rotary_range`, or those of a learned table."""
    config = _of_texts(config)
    limit = rotary_range(config)[0]
    if limit is None and not _rotary(config):
        limit = getattr(config, "max_position_embeddings", None)
    return limit if limit is not None and limit > 0 else None


def clamped(positions: Tensor, limit: int | None) -> Tensor:
    """Return positions of a pass, of which none is beyond `most_positions`.

    Those that were are of drafts past the end of a text, whose results nobody reads.
    """
    return positions if limit is None else positions.clamp_max(limit - 1)


def why(config: PreTrainedConfig) -> str:
    """Say, in brackets, why a context is shorter than the model's own; '' where it is not."""
    limit, kind = rotary_range(config)
    if limit is None or limit != context(config):
        return ""
    return f" (beyond it {config.get_text_config().model_type}'s {kind} would depend on the batch)"


def guard(network: PreTrainedModel) -> PreTrainedModel:
    """Make each forward with a position beyond `rotary_range` a ValueError; return the network."""
    limit, _ = rotary_range(network.config)
    if limit is not None:
        for module in network.modules():
            if hasattr(module, "rope_type"):
                check = partial(_check_positions, limit=limit, reason=why(network.config))
                module.register_forward_pre_hook(check, with_kwargs=True)
    return network


def _check_positions(module: nn.Module, args: tuple, given: dict, limit: int, reason: str) -> None:
    positions = given["position_ids"] if "position_ids" in given else args[1]
    if (tokens := int(positions.max()) + 1) > limit:
        raise ValueError(
            f"a text has {tokens} tokens, more than the network's context of {limit}{reason}: "
            "give shorter texts"
        )
