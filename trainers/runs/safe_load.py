"""Reading checkpoints without running what they hold: a pickle may name any function to call.

Our files have tensors and plain Python values alone, so torch's `weights_only=True` reads them. The
metadata of shards is a pickle that torch.distributed.checkpoint does not check, so it is checked
here first. DeepSpeed reads its own folders and checks nothing (SECURITY.md).
"""

import pickle
import re
from pathlib import Path
from typing import Any

import torch

METADATA = ".metadata"  # the file of torch.distributed.checkpoint
# Metadata consist of classes of these modules and plain types.
_OWNERS = ("torch.distributed.checkpoint.", "torch.distributed._shard.")
_PLAIN = {("torch", "Size"), ("torch.serialization", "_get_layout")}
_PLAIN |= {("collections", "OrderedDict"), ("builtins", "set")}
_PLAIN |= {(m, "PosixPath") for m in ("pathlib", "pathlib._local")}  # of Python 3.13


class Refused(ValueError):
    """A checkpoint that names something to be called; nothing of it was run."""

    def __init__(self, path: Path, name: str):
        super().__init__(
            f"the checkpoint {path} asks to call {name}, which no checkpoint of this version of "
            "parade does: nothing of it was run. Start anew with resume=never, or give another one"
        )


def read_file(path: Path) -> dict[str, Any]:
    """Read a checkpoint that is one file; raises Refused for more than tensors and values."""
    try:
        return torch.load(path, weights_only=True, map_location="cpu", mmap=True)
    except pickle.UnpicklingError as error:
        if found := re.search(r"GLOBAL (\S+)|call to (\S+)", str(error)):
            raise Refused(path, found[1] or found[2]) from None
        raise


def check_folder(folder: Path) -> None:
    """Raise Refused for shards whose metadata name more than the classes of torch's metadata."""
    for file in folder.rglob(METADATA):
        with file.open("rb") as content:
            _Metadata(content, folder).load()


class _Metadata(pickle.Unpickler):
    def __init__(self, content, folder: Path):
        super().__init__(content)
        self._folder = folder

    def find_class(self, module: str, name: str) -> Any:
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if dtype or (module, name) in _PLAIN:
            return super().find_class(module, name)
        if module.startswith(_OWNERS) and "." not in name:
            found = super().find_class(module, name)
            # Not what such a module imports: its `os`, for one.
            if isinstance(found, type) and found.__module__.startswith(_OWNERS):
                return found
        raise Refused(self._folder, f"{module}.{name}")
