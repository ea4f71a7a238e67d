"""Reading checkpoints without running what they hold: a pickle may name any function to call.

Our files have tensors and plain Python values alone, so torch's `weights_only=True` reads them.
torch.distributed.checkpoint checks neither the metadata of shards, a pickle, nor the values in
shards that are no tensors, so they are checked here first. DeepSpeed reads its own folders and
checks nothing (SECURITY.md).
"""

import io
import pickle
import re
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

_Unpickler: Any = pickle._Unpickler  # Python's: C's cannot refuse a change of a class
METADATA = ".metadata"  # the file of torch.distributed.checkpoint
# Metadata consist of these classes, which hold data, and plain types.
_DATA = {
    ("torch.distributed.checkpoint.metadata", name)
    for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata",
                 "TensorProperties", "ChunkStorageMetadata", "BytesStorageMetadata",
                 "_MEM_FORMAT_ENCODING")
} | {("torch.distributed.checkpoint.filesystem", "_StorageInfo")}  # fmt: skip
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
    return _read(path, path, mmap=True)


def _read(source: Any, path: Path, **options) -> Any:
    try:
        return torch.load(source, weights_only=True, map_location="cpu", **options)
    except pickle.UnpicklingError as error:
        if found := re.search(r"GLOBAL (\S+)|call to (\S+)", str(error)):
            raise Refused(path, found[1] or found[2]) from None
        raise


def check_folder(folder: Path) -> None:
    """Check shards before torch.distributed.checkpoint reads them.

    Raises:
        Refused: Their metadata name more than `_DATA` and plain types, or a value asks for a call.
        KeyError, TypeError, pickle.UnpicklingError: They are damaged, or name a file elsewhere.
    """
    for file in folder.rglob(METADATA):
        with file.open("rb") as content:
            found = _Metadata(content, folder).load()
        if not isinstance(found, Metadata):
            raise TypeError(f"its {METADATA} holds {type(found).__name__}")
        for index, info in found.storage_data.items():
            path = file.parent / _name(info)
            if not isinstance(found.state_dict_metadata[index.fqn], TensorStorageMetadata):
                # torch unpickles a value with whatever it calls.
                with path.open("rb") as content:
                    content.seek(info.offset)
                    _read(io.BytesIO(content.read(info.length)), path)


def _name(info: Any) -> str:
    """Return the file of a value of shards; TypeError unless it is beside the metadata."""
    name = info.relative_path
    plain = isinstance(info, _StorageInfo) and type(name) is str and Path(name).name == name
    if not plain or info.transform_descriptors:
        raise TypeError(f"its {METADATA} names {str(name)[:60]!r}, no file of its own")
    return name


class _Metadata(_Unpickler):
    dispatch = dict(_Unpickler.dispatch)

    def __init__(self, content: BinaryIO, folder: Path):
        super().__init__(content)
        self._folder = folder

    def find_class(self, module: str, name: str) -> Any:
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if dtype or (module, name) in _DATA | _PLAIN:
            return super().find_class(module, name)
        raise Refused(self._folder, f"{module}.{name}")

    def load_build(self) -> None:
        """Set the attributes of a new object; of a class or an enum they are everybody's."""
        if not is_dataclass(type(self.stack[-2])):
            raise pickle.UnpicklingError
        super().load_build()

    dispatch[pickle.BUILD[0]] = load_build
