"""Options of a model that is loaded: its path, and its weights' type and devices.

They are checked before torch is imported, which takes seconds, so that a typo does not.
"""

import re
from importlib.util import find_spec
from pathlib import Path

GGUF = ".gguf"
CHECKPOINTS = (".pth", ".safetensors")  # files in the layout of MAR's program
# The file with the `parade` entry of an adapter's export: beside a config.json, transformers would
# look for the weights of the adapter's base in the same folder.
KEPT = "parade_export.json"
CONFIGS = ("config.json", KEPT, "adapter_config.json")  # the first that is there
DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")  # of weights
DEVICES = ("cpu", "cuda", "mps", "xpu")
STRATEGIES = ("auto", "balanced", "balanced_low_0", "sequential")
_LIMIT = re.compile(r"(cpu|\d+):(\d+(?:\.\d+)?)(KB|MB|GB|KiB|MiB|GiB)")
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def looks_local(path: str) -> bool:
    """Return whether a path is local: Hub ids have one slash at most and no leading dot."""
    here = path.startswith((".", "/", "~")) or path.endswith(GGUF)
    return here or path.count("/") != 1 or Path(path).exists()


def check_there(path: str) -> None:
    """Raise ValueError for a local folder without a model."""
    if looks_local(path) and not path.endswith((GGUF, *CHECKPOINTS)):
        config_in(path)


def config_in(path: str) -> Path:
    """Return the first of CONFIGS that a folder has; raise ValueError where there is none."""
    for file in (Path(path) / name for name in CONFIGS):
        if file.is_file():
            return file
    raise ValueError(
        f"no model at {path!r}: there is no {Path(path) / CONFIGS[0]}. Give an exported "
        "folder (python -m trainers.fit recipe=deer_stage2 writes one) or a Hub id"
    )


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
    limits: dict[int | str, int] = {}
    for part in device_map.replace(" ", "").split(","):
        if not (limit := _LIMIT.fullmatch(part)):
            raise ValueError(
                f"device_map={device_map!r} is not allowed. Choose from {list(STRATEGIES)}, or "
                "give limits such as 0:60GiB,cpu:200GiB (the number of a GPU or cpu, and its "
                "memory; the rest stays on disk)"
            )
        device: int | str = "cpu" if limit[1] == "cpu" else int(limit[1])
        if isinstance(device, int) and device >= (count := _gpus()):
            raise ValueError(
                f"device_map={device_map!r} names GPU {device}, but there are {count} here: number "
                "them from 0, or give cpu alone"
            )
        limits[device] = int(float(limit[2]) * _UNITS[limit[3]])
    return limits


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


def check_dtype(dtype: object) -> None:
    """Raise ValueError if weights cannot be of a type, by itself, its name or 'auto'."""
    if isinstance(dtype, str) and dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r} is no type of weights. Choose from {[*DTYPES]}")


def check_device(device: object) -> None:
    """Raise ValueError if this machine does not have a device: 'cpu', 'cuda', 'cuda:1', ..."""
    kind, colon, number = str(device).partition(":")
    if kind not in DEVICES or (colon and not number.isdecimal()):
        raise ValueError(f"device={device!r} is no device. Choose from {sorted(DEVICES)}")
    if kind == "cpu":
        return
    import torch

    here = {"cpu": 1, "cuda": torch.cuda.device_count(), "xpu": torch.xpu.device_count()}
    here["mps"] = int(torch.backends.mps.is_available())
    if int(number or 0) >= here[kind]:
        usable = [f"{k}:{i}" if k != "cpu" else k for k, n in here.items() for i in range(n)]
        raise ValueError(f"device={device} is not on this machine. Choose from {usable}")
