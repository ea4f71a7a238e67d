"""Traces on disk, so that a prompt is decoded once, however many graphs are made of its trace.

A trace is found again by its key: all that it depends on, as JSON holds it.
"""

import hashlib
import json
import os
import uuid
from pathlib import Path

import numpy as np
import torch
from torch import Tensor


def read_trace(folder: str | Path, key: dict) -> Tensor | None:
    """The trace of a key; None where there is none. Errors: its file is damaged, or of others."""
    file, key = _file(folder, key)
    if not file.exists():
        return None
    try:
        # A zip: what is read is held against its checksum.
        with np.load(file, allow_pickle=False) as stored:
            found, trace = str(stored["key"]), stored["trace"]
    except Exception as error:  # zipfile, zlib and numpy have many
        raise ValueError(
            f"{file} is damaged or no trace ({type(error).__name__}): remove it, and the prompt is "
            "decoded again"
        ) from error
    if found != key:
        raise ValueError(
            f"{file} holds the trace of something else: remove it, and the prompt is decoded again"
        )
    return torch.from_numpy(trace)


def write_trace(folder: str | Path, key: dict, trace: Tensor) -> None:
    """Keep the trace of a key: its file is there whole or not at all."""
    file, key = _file(folder, key)
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.{uuid.uuid4().hex}")
    try:
        with temporary.open("wb") as stream:
            np.savez_compressed(stream, key=key, trace=trace.numpy())
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)


def _file(folder: str | Path, key: dict) -> tuple[Path, str]:
    text = json.dumps(key, sort_keys=True)
    return Path(folder) / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.npz", text
