"""Sequences that wait on disk: many prompts in the memory of a few."""

import json
import tempfile
from array import array
from collections.abc import Iterable, Sequence


class Spool(Sequence):
    """A sequence of JSON values in a temporary file, read by number or by slice.

    The file has no name and is gone with the sequence; memory holds eight bytes a value.

    Args:
        values: Written in their order, and held one at a time.

    >>> Spool({"id": i} for i in range(5))[1:3]
    [{'id': 1}, {'id': 2}]
    """

    def __init__(self, values: Iterable):
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 (it is gone with the sequence)
        self._starts = array("Q")
        for value in values:
            self._starts.append(self._file.tell())
            self._file.write(json.dumps(value).encode() + b"\n")

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, which):
        if isinstance(which, slice):
            return [self[i] for i in range(len(self))[which]]
        self._file.seek(self._starts[which])
        return json.loads(self._file.readline())
