"""Reading checkpoints without running what they hold: a pickle may name any function to call.

Every file of ours has tensors and plain Python values alone, so all are read with torch's
`weights_only=True`. The metadata of a folder of shards is a pickle of its own, which
torch.distributed.checkpoint reads without a check; it is checked here first. Folders that DeepSpeed
has written are read by DeepSpeed, which checks nothing (SECURITY.md).
"""

import os
import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

FORCED = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"  # torch's switch, for calls that are not ours
METADATA = ".metadata"  # of torch.distributed.checkpoint
# What metadata are made of: classes of these modules, and plain types.
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
    """The content of a checkpoint that is one file.

    Args:
        path: A whole zip file of torch.

    Raises:
        Refused: It holds more than tensors and plain values.
    """
    try:
        return torch.load(path, weights_only=True, map_location="cpu", mmap=True)
    except pickle.UnpicklingError as error:
        if found := re.search(r"GLOBAL (\S+)|call to (\S+)", str(error)):
            raise Refused(path, found[1] or found[2]) from None
        raise


def check_folder(folder: Path) -> None:
    """Check that a folder of shards, written by FSDP2, can be read without running what it holds.

    Args:
        folder: The checkpoint.

    Raises:
        Refused: Its metadata name something else than the classes of torch's own metadata.
        OSError: It cannot be read.
    """
    for file in folder.rglob(METADATA):
        with file.open("rb") as content:
            _Metadata(content, folder).load()


@contextmanager
def tensors_only() -> Iterator[None]:
    """A context in which torch loads tensors and plain values alone, whoever calls it."""
    before = os.environ.get(FORCED)
    os.environ[FORCED] = "1"
    try:
        yield
    finally:
        os.environ.pop(FORCED)
        if before is not None:
            os.environ[FORCED] = before


class _Metadata(pickle.Unpickler):
    def __init__(self, content, folder: Path):
        super().__init__(content)
        self._folder = folder

    def find_class(self, module: str, name: str) -> Any:
        """A class of torch's metadata, or one of the plain types in it."""
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if dtype or (module, name) in _PLAIN:
            return super().find_class(module, name)
        if module.startswith(_OWNERS) and "." not in name:
            found = super().find_class(module, name)
            # Not what such a module imports: its `os`, for one.
            if isinstance(found, type) and found.__module__.startswith(_OWNERS):
                return found
        raise Refused(self._folder, f"{module}.{name}")
