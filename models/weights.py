"""Checks of loaded weights: a checkpoint must fill its network, with finite numbers.

transformers fills what a checkpoint lacks with random numbers and says so only in a log.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

SHOWN = 3  # keys that a message names
DEEPEST = 10_000  # layers


@contextmanager
def one_line(what: str, path: str) -> Iterator[None]:
    """A context that turns any library's error into one line.

    Args:
        what: What is loaded, such as 'a MAR'.
        path: From where.

    Raises:
        ValueError: Whatever was raised inside; the line names `what` and the path.
    """
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        if not Path(path).exists():
            reason = f"there is no such folder or file. {reason}"
        raise ValueError(f"cannot load {what} from {path!r}: {reason}") from error


def check_depth(config: Mapping) -> None:
    """Check the layers of a configuration, which are made before any weight is read.

    Args:
        config: What a config.json holds.

    Raises:
        ValueError: More than any network has, or none.
    """
    depth = config.get("num_hidden_layers", 1)
    if type(depth) is not int or not 0 < depth <= DEEPEST:
        raise ValueError(f"num_hidden_layers={depth} is not allowed: at least 1, at most {DEEPEST}")


def check_complete(network: nn.Module, found: Mapping[str, Collection]) -> None:
    """Check that a checkpoint has all of the network's tensors and no others.

    Args:
        network: The loaded one; a tensor that two names share needs to be stored once.
        found: What `from_pretrained(..., output_loading_info=True)` returns beside the network.
            Keys that a class declares itself (tied weights, keys to ignore) are not in it.

    Raises:
        ValueError: Tensors are missing, unexpected or of another size; one line names them.
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
    """Check that all weights are finite numbers; reads all of them once.

    Args:
        network: The loaded one; tensors on the device 'meta' are passed over.

    Raises:
        ValueError: A tensor with a number that is not finite; one line names it.
    """
    for name, weight in network.named_parameters():
        # isfinite knows no 8-bit floats, and those can hardly overflow unseen.
        known = weight.is_floating_point() and weight.element_size() > 1 and not weight.is_meta
        if known and not torch.isfinite(weight).all():
            raise ValueError(f"the weights of {name} are not finite: the training diverged")
