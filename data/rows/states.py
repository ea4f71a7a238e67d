"""Packed rows with a target's hidden states, computed and stored once, and then only read."""

import hashlib
import json
import os
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from data.corruption.draft_blocks import STATES
from data.files import atomic_write, check_space
from data.rows.packing import PackedRows

SHARD = 64  # rows: what an interrupted run computes again, at the most
DTYPE = torch.bfloat16


class RowsWithStates(PackedRows):
    """Packed rows with one more column, `states` [length, width]: the target's at their tokens.

    The bfloat16 shards lie in the rows' folder and are memory-mapped. `write` makes them, in as
    many processes as there are shards.

    Args:
        folder: The packed rows' folder.
        made_by: The states' inputs other than the rows, such as the target and its layers.
        width: Numbers per token, all layers together.
    """

    def __init__(self, folder: str | os.PathLike, made_by: dict, width: int) -> None:
        super().__init__(folder)
        self.made_by, self.width = made_by, width
        key = hashlib.sha256(json.dumps(made_by, sort_keys=True).encode()).hexdigest()[:16]
        self.states_folder = self.folder.with_name(f"{self.folder.name}-states-{key}")
        self._files: dict[int, safe_open] = {}

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return the shape of all states: (rows, length, width)."""
        return len(self), self.manifest["length"], self.width

    def file(self, shard: int) -> Path:
        """Return the path of a shard, which need not exist yet."""
        return self.states_folder / f"{shard:05d}.safetensors"

    def rows_of(self, shard: int) -> range:
        """Return the rows of a shard."""
        return range(shard * SHARD, min(len(self), (shard + 1) * SHARD))

    def missing(self) -> list[int]:
        """Return the shards that are not there yet."""
        shards = range(-(-len(self) // SHARD))
        return [shard for shard in shards if not self.file(shard).is_file()]

    def check_size(self, most: float) -> None:
        """Raise ValueError if all shards take over `most` bytes, or more than the disk has free."""
        rows, length, width = self.shape
        needed = rows * length * width * DTYPE.itemsize
        if needed > most:
            raise ValueError(
                f"the target's states at {rows * length:,} tokens take {needed / 1e9:.3g} GB, and "
                f"data.stored_states allows {most / 1e9:.3g}: allow more, or take fewer prompts "
                "(data.train.prompts) or layers (network.states)"
            )
        if left := sum(len(self.rows_of(shard)) for shard in self.missing()):
            check_space(self.folder, needed * left // rows)

    def write(self, shard: int, states: Tensor) -> None:
        """Write a shard atomically: states [rows of the shard, length, width]."""
        assert states.shape == (len(self.rows_of(shard)), *self.shape[1:])
        tensors = {STATES: states.to("cpu", DTYPE).contiguous()}
        self.states_folder.mkdir(parents=True, exist_ok=True)
        with atomic_write(self.file(shard)) as temporary:
            save_file(tensors, temporary)

    def states(self, row: int) -> Tensor:
        """Return the states [length, width] of a row whose shard is there."""
        shard, at = divmod(row, SHARD)
        if shard not in self._files:
            self._files[shard] = safe_open(self.file(shard), "pt")
        return self._files[shard].get_slice(STATES)[at]

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {**super().__getitem__(index), STATES: self.states(index)}

    def __reduce__(self) -> tuple:
        return RowsWithStates, (self.folder, self.made_by, self.width)
