"""A disk cache of decoding traces, so that each prompt is decoded once for all draft graphs.

A trace's file is named by a hash of its key: a JSON object of everything the trace depends on.
"""

import hashlib
import json
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from data.files import atomic_write


def read_trace(folder: str | Path, key: dict) -> Tensor | None:
    """Return the trace of a key, None if none is stored; raise ValueError for a damaged file."""
    file, text = _file(folder, key)
    if not file.exists():
        return None
    try:
        # An .npz is a zip, so what is read is compared with its checksum.
        with np.load(file, allow_pickle=False) as stored:
            found, trace = str(stored["key"]), stored["trace"]
    except Exception as error:  # zipfile, zlib and numpy have many
        raise ValueError(
            f"{file} is damaged or not a trace ({type(error).__name__}): remove it, and the prompt "
            "is decoded again"
        ) from error
    if found != text:
        raise ValueError(
            f"{file} holds the trace of another key: remove it, and the prompt is decoded again"
        )
    return torch.from_numpy(trace)


def write_trace(folder: str | Path, key: dict, trace: Tensor) -> None:
    """Store the trace of a key, atomically; make the folder if needed."""
    file, text = _file(folder, key)
    file.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(file) as temporary, temporary.open("wb") as stream:
        np.savez_compressed(stream, key=text, trace=trace.numpy())


def _file(folder: str | Path, key: dict) -> tuple[Path, str]:
    text = json.dumps(key, sort_keys=True)
    return Path(folder) / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.npz", text
