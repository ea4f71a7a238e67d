"""Placement: a network's weights spread over devices, host memory and disk (`device_map`).

transformers and accelerate do the work: a layer runs on its own device, and weights in host memory
or on disk are loaded for its forward. A spread network must not be moved with `.to()`; its inputs
go to `input_device`.
"""

from collections import Counter

import torch
from torch import nn
from transformers import PreTrainedModel

_NOT_RUN_ON = ("cpu", "disk")  # where weights only wait, if the map names a GPU too


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
