"""Checks of loaded weights: a checkpoint must fill its network, with finite numbers.

transformers fills what a checkpoint lacks with random numbers and says so only in a log.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

SHOWN = 3  # keys that a message names
DEEPEST = 10_000  # layers
GGUF = ".gguf"


@contextmanager
def one_line(what: str, path: str) -> Iterator[None]:
    """Turn any library's error in the context into a ValueError of one line, naming the path."""
    try:
        yield
    except Exception as error:  # each library has its own; a user needs one line
        raise ValueError(f"cannot load {what} from {path!r}: {why(error, path)}") from error


def why(error: Exception, path: str) -> str:
    """Return why transformers cannot load a folder or Hub id, in one line."""
    if looks_local(path) and not Path(path).exists():
        return "there is no such folder"
    # In place of the libraries' own advice.
    if "trust_remote_code=True" in str(error):
        return "it brings code of its own: read it, and allow it with trust_remote_code=true"
    if "above report" in str(error):
        return "its config.json and its weights are of different sizes"
    if "weights_only" in str(error):
        return "its weights are a pickle that asks for more than tensors: get them as safetensors"
    return " ".join(str(error).split())[:300] or type(error).__name__


def looks_local(path: str) -> bool:
    """Return whether a path is local: Hub ids have one slash at most and no leading dot."""
    here = path.startswith((".", "/", "~")) or path.endswith(GGUF)
    return here or path.count("/") != 1 or Path(path).exists()


def load_own(
    kind: type[PreTrainedModel], what: str, path: str, dtype: str | torch.dtype
) -> PreTrainedModel:
    """Return a network of one of our classes, in evaluation mode, with its tensors checked."""
    with one_line(what, path):
        network, found = kind.from_pretrained(path, dtype=dtype, output_loading_info=True)
        check_complete(network, found)
        if Path(path).exists():
            check_finite(network)
        return network


def check_depth(config: Mapping) -> None:
    """Check the number of layers in a config.json, which are made before any weight is read."""
    depth = config.get("num_hidden_layers", 1)
    if type(depth) is not int or not 0 < depth <= DEEPEST:
        raise ValueError(f"num_hidden_layers={depth} is not allowed: at least 1, at most {DEEPEST}")


def check_complete(network: nn.Module, found: Mapping[str, Collection]) -> None:
    """Check that a checkpoint has all of the network's tensors and no others; tied ones count once.

    `found` is the loading info of `from_pretrained(..., output_loading_info=True)`, which leaves
    out keys that a class declares itself (tied weights, keys to ignore).
    """
    weights = dict(network.named_parameters(remove_duplicate=False))
    missing = set(found.get("missing_keys", ()))
    loaded = {id(weight) for name, weight in weights.items() if name not in missing}
    wrong = {
        "lacks tensors of the network": {k for k in missing if id(weights.get(k)) not in loaded},
        "has tensors that the network does not have": found.get("unexpected_keys"),
        "has tensors of another size than the network": found.get("mismatched_keys"),
    }
    for what, keys in wrong.items():
        if keys:
            names = sorted(str(key) for key in keys)
            more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            raise ValueError(
                f"the checkpoint {what}: {', '.join(names[:SHOWN])}{more}. Its config.json and its "
                "weights are not of one model, or a file of it is missing"
            )


def check_finite(network: nn.Module) -> None:
    """Check that all weights, except those on the device 'meta', are finite numbers."""
    for name, weight in network.named_parameters():
        # isfinite knows no 8-bit floats, and those can hardly overflow unseen.
        known = weight.is_floating_point() and weight.element_size() > 1 and not weight.is_meta
        if known and not torch.isfinite(weight).all():
            raise ValueError(f"the weights of {name} are not finite: the training diverged")
