"""Placement: a network's weights spread over devices, host memory and disk (`device_map`).

transformers and accelerate do the work: a layer runs on its own device, and weights in host memory
or on disk are loaded for its forward. A spread network must not be moved with `.to()`; its inputs
go to `input_device`.
"""

import re
from collections import Counter
from importlib.util import find_spec

import torch
from torch import nn
from transformers import PreTrainedModel

DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")  # of weights

STRATEGIES = ("auto", "balanced", "balanced_low_0", "sequential")
_LIMIT = re.compile(r"(cpu|\d+):(\d+(?:\.\d+)?)(KB|MB|GB|KiB|MiB|GiB)")
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_NOT_RUN_ON = ("cpu", "disk")  # where weights only wait, if the map names a GPU too


def loading_options(device_map: str | None) -> dict:
    """Return the arguments of `from_pretrained` that spread a network; {} for None.

    `device_map` is a strategy of accelerate ('auto', 'balanced', ...), or each device's memory
    limit, as in '0:60GiB,cpu:200GiB' (the first GPU, then host memory; the rest stays on disk).
    """
    if device_map is None:
        return {}
    limits = None if device_map in STRATEGIES else parsed(str(device_map))
    if find_spec("accelerate") is None:
        raise ValueError(f"device_map={device_map} needs accelerate: pip install accelerate")
    if limits is None:
        return {"device_map": device_map}
    return {"device_map": "auto", "max_memory": limits}


def parsed(device_map: str) -> dict[int | str, int]:
    """Return the bytes per device in a text such as '0:60GiB,cpu:200GiB'.

    >>> parsed("cpu:1.5MiB")
    {'cpu': 1572864}
    """
    limits = {}
    for part in device_map.replace(" ", "").split(","):
        if not (limit := _LIMIT.fullmatch(part)):
            raise ValueError(
                f"device_map={device_map!r} is not allowed. Choose from {list(STRATEGIES)}, or "
                "give limits such as 0:60GiB,cpu:200GiB (the number of a GPU or cpu, and its "
                "memory; the rest stays on disk)"
            )
        device = limit[1] if limit[1] == "cpu" else int(limit[1])
        if device != "cpu" and device >= (count := torch.cuda.device_count()):
            raise ValueError(
                f"device_map={device_map!r} names GPU {device}, but there are {count} here: number "
                "them from 0, or give cpu alone"
            )
        limits[device] = int(float(limit[2]) * _UNITS[limit[3]])
    return limits


def check_dtype(dtype: torch.dtype | str) -> None:
    """Raise ValueError if weights cannot be of a type, by itself, its name or 'auto'."""
    if isinstance(dtype, str) and dtype not in DTYPES:
        raise ValueError(f"dtype={dtype} is no type of weights. Choose from {[*DTYPES]}")


def check_device(device: torch.device | str) -> None:
    """Raise ValueError if this machine does not have a device: 'cpu', 'cuda', 'cuda:1', ..."""
    here = {"cpu": 1, "cuda": torch.cuda.device_count(), "xpu": torch.xpu.device_count()}
    here["mps"] = int(torch.backends.mps.is_available())
    kind, colon, number = str(device).partition(":")
    if kind not in here or (colon and not number.isdecimal()):
        raise ValueError(f"device={device} is no device. Choose from {sorted(here)}")
    if kind != "cpu" and int(number or 0) >= here[kind]:
        usable = [f"{k}:{i}" if k != "cpu" else k for k, n in here.items() for i in range(n)]
        raise ValueError(f"device={device} is not on this machine. Choose from {usable}")


def is_spread(network: nn.Module) -> bool:
    """Return whether a network was loaded with a `device_map` that uses more than one device."""
    return bool(getattr(network, "hf_device_map", None))


def place(network: PreTrainedModel, device: torch.device | str) -> PreTrainedModel:
    """Move a network to a device unless it is spread, and return it."""
    return network if is_spread(network) else network.to(device)


def input_device(network: PreTrainedModel) -> torch.device:
    """Return the device of a network's inputs and logits.

    In a spread network it is the first that computes: weights in host memory or on disk are brought
    to the first GPU, or used on the CPU if there is none.
    """
    if not is_spread(network):
        return network.device
    runs = (place for place in network.hf_device_map.values() if place not in _NOT_RUN_ON)
    return _runs_on(next(runs, "cpu"))


def layers_by_device(network: PreTrainedModel) -> Counter[torch.device]:
    """Count the decoder layers on each device of a spread network; empty for any other."""
    layers = getattr(network.get_decoder(), "layers", None) if is_spread(network) else None
    if not isinstance(layers, nn.ModuleList):
        return Counter()
    names = {id(module): name for name, module in network.named_modules()}
    return Counter(_device_of(network, names[id(layer)]) for layer in layers)


def _device_of(network: PreTrainedModel, name: str) -> torch.device:
    """Return a module's device: the map names the module or one that contains it."""
    places = network.hf_device_map
    while name and name not in places:
        name = name.rpartition(".")[0]
    place = places.get(name, "disk")
    return input_device(network) if place in _NOT_RUN_ON else _runs_on(place)


def _runs_on(place: int | str | torch.device) -> torch.device:
    return torch.device("cuda", place) if isinstance(place, int) else torch.device(place)
