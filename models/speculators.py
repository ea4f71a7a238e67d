"""The entry of the package `speculators` (0.9.0) in a drafter's config.json."""

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedConfig

VERSION = "0.9.0"
LAYER = "transformer_layer_config"
KEYS = ("speculators_model_type", "speculators_version", "speculators_config", LAYER)


def entry(
    kind: str, config: PreTrainedConfig, count: int, target: str, architectures: Sequence[str]
) -> dict[str, Any]:
    """Return the keys that every drafter has there.

    Args:
        kind: The package's type of drafter.
        config: The drafter's own.
        count: The tokens of a draft.
        target: The target's name.
        architectures: Those of the target's config.json.
    """
    known = type(config)().to_diff_dict().keys() - {"transformers_version"}
    layer = {key: x for key, x in config.to_diff_dict().items() if key in known}
    return {
        "speculators_model_type": kind,
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": count}],
            "verifier": {"name_or_path": target, "architectures": [*architectures]},
        },
        LAYER: layer | {"model_type": config.model_type},
    }


def forget(config: PreTrainedConfig, keys: Sequence[str]) -> None:
    """Remove the entry from a config that has it, and other keys of the package's."""
    if hasattr(config, "speculators_config"):
        for key in (*KEYS, *keys):
            vars(config).pop(key, None)
