"""Checks of loaded weights: a checkpoint must fill its network, with finite numbers.

transformers fills what a checkpoint lacks with random numbers and says so only in a log.
"""

import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import PreTrainedModel
from transformers.utils import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
    cached_file,
    find_adapter_config_file,
)
from transformers.utils.hub import get_checkpoint_shard_files

from models.options import looks_local
from terminal.progress import Work

SHOWN = 3  # keys that a message names
DEEPEST = 10_000  # layers
# Limits by a checkpoint: what one of its tensors may become in tensors, and one byte in weights.
SPLIT, PACKED, SMALL = 4, 8, 100
_OPEN: list[dict] = []  # what is left in each context that is open


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


@contextmanager
def bounded(path: str, **hub) -> Iterator[None]:
    """Refuse, in the context, weights outside of a folder, and a network too large for its weights.

    A config.json can ask for 10,000 layers, or an index for any file of this machine. So the names
    in the index are checked first, and a network ends as soon as it has more weights than the
    files. `path` is a folder or Hub id, and `hub` has options of the Hub. A gguf file gives no
    bound.
    """
    files = weight_files(path, **hub)
    if not files:
        yield
        return
    tensors = sum(map(_count, files))
    with no_larger_than(tensors, sum(file.stat().st_size for file in files)):
        yield


def _count(file: Path) -> int:
    """Return the number of tensors in a file of weights."""
    if file.suffix == ".bin":
        return len(torch.load(file, weights_only=True, map_location="meta", mmap=True))
    with safe_open(file, framework="pt") as opened:
        return len(opened.keys())


def weight_files(path: str, **hub) -> list[Path]:
    """Return a model's files of weights; ValueError where its index names another folder's."""
    optional = {"_raise_exceptions_for_missing_entries": False, **hub}
    for name in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME):
        found = cached_file(path, name, **optional)
        if found and name in (SAFE_WEIGHTS_NAME, WEIGHTS_NAME):
            return [Path(found)]
        if index := found:
            for shard in {*json.loads(Path(index).read_text())["weight_map"].values()}:
                if Path(shard).name != shard:
                    raise ValueError(
                        f"its {name} names {shard[:60]!r}: only files beside it are read"
                    )
            return [Path(f) for f in get_checkpoint_shard_files(path, index, **hub)[0]]
    if adapter := find_adapter_config_file(path, **hub):
        return weight_files(json.loads(Path(adapter).read_text())["base_model_name_or_path"])
    return []


@contextmanager
def no_larger_than(tensors: int, size: int) -> Iterator[None]:
    """Raise ValueError in the context as soon as networks have more weights than a checkpoint's.

    A checkpoint may hold a weight in a quarter of a byte, and a tensor that a network splits in
    several or ties to another; so the limit is several times its own. Contexts inside count alone.

    Args:
        tensors: How many the checkpoint has.
        size: Its bytes.
    """
    left = {"tensors": SPLIT * tensors + SMALL, "weights": PACKED * size + SMALL**3}
    seen: set[tuple[int, str]] = set()  # as loading replaces parameters

    def registered(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is None or _OPEN[-1] is not left or (id(module), name) in seen:
            return
        seen.add((id(module), name))
        left["tensors"] -= 1
        left["weights"] -= parameter.numel()
        if min(left.values()) < 0:
            raise ValueError(
                f"its config asks for more weights than there are ({tensors} tensors, {size:,} "
                "bytes): they are not of one model"
            )

    handle = register_module_parameter_registration_hook(registered)
    _OPEN.append(left)
    try:
        yield
    finally:
        _OPEN.pop()
        handle.remove()


def load_own(
    kind: type[PreTrainedModel], what: str, path: str, dtype: str | torch.dtype
) -> PreTrainedModel:
    """Return a network of one of our classes, in evaluation mode, with its tensors checked."""
    with one_line(what, path), Work(f"loading {path}"):
        with bounded(path):
            network, found = kind.from_pretrained(path, dtype=dtype, output_loading_info=True)
        check_complete(network, found)
        if Path(path).exists():
            check_finite(network)
        return network


def check_depth(config: Mapping) -> None:
    """Check the number of layers in a config.json, which are made before any weight is read."""
    text = config.get("text_config")  # of a model that reads images too
    for part in (config, text if isinstance(text, Mapping) else {}):
        depth = part.get("num_hidden_layers", 1)
        if type(depth) is not int or not 0 < depth <= DEEPEST:
            raise ValueError(
                f"num_hidden_layers={depth} is not allowed: at least 1, at most {DEEPEST}"
            )


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
