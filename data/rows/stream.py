"""Training samples and their order, as a pure function of the seed and the sample number.

Sample n of a run is the same row with the same noise for any number of processes, workers and
accumulation steps. A resumed run only needs to know the number of its next sample.
"""

import hashlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

# (row, generator, sample number) -> sample; the number is for noise that changes during a run.
Corruption = Callable[[Any, torch.Generator, int], dict[str, Tensor]]


class Stream(Dataset):
    """The samples of a run: rows in a new random order each epoch, with noise keyed by the number.

    `seed` is that of order and noise; `corruption` makes a sample from a row, None keeps the row.
    """

    def __init__(self, rows: Dataset, seed: int, corruption: Corruption | None = None):
        self.rows, self.seed, self.corruption = rows, seed, corruption
        self._epoch: tuple[int, Tensor] = (-1, torch.empty(0))

    def __getitem__(self, n: int) -> dict[str, Tensor]:
        """Return sample number n, counted over all epochs."""
        row = self.rows[self.row_of(n)]
        if self.corruption is None:
            return row
        return self.corruption(row, _generator(self.seed, n, 1), n)

    def row_of(self, n: int) -> int:
        """Return the index of sample number n's row."""
        epoch, i = divmod(n, len(self.rows))
        if self._epoch[0] != epoch:
            order = torch.randperm(len(self.rows), generator=_generator(self.seed, epoch, 0))
            self._epoch = (epoch, order)
        return int(self._epoch[1][i])


class BatchSchedule(Sampler):
    """A batch sampler: the sample numbers of one process, micro-batch by micro-batch.

    A step takes the next `batch_size` sample numbers, in equal parts per process.

    Args:
        steps: The training steps, from 0.
        batch_size: Samples per step over all processes, a multiple of world * micro_batch_size.
        micro_batch_size: Samples per forward of one process.
        rank: This process, from 0.
        world: Number of processes.
    """

    def __init__(
        self,
        steps: range,
        batch_size: int,
        micro_batch_size: int,
        rank: int = 0,
        world: int = 1,
    ):
        if batch_size % (world * micro_batch_size):
            sizes = [n for n in range(1, batch_size + 1) if batch_size % (world * n) == 0]
            processes = [n for n in range(1, batch_size + 1) if batch_size % n == 0]
            raise ValueError(
                f"batch_size={batch_size} must be a multiple of {world} processes times "
                f"micro_batch_size={micro_batch_size}. "
                + (
                    f"Choose micro_batch_size from {sizes}"
                    if sizes
                    else f"Choose the number of processes from {processes}"
                )
            )
        self.steps, self.rank, self.world = steps, rank, world
        self.batch_size, self.micro_batch_size = batch_size, micro_batch_size

    @property
    def accumulate(self) -> int:
        """Return the micro-batches per step and process (gradient accumulation)."""
        return self.batch_size // (self.world * self.micro_batch_size)

    def samples(self, step: int) -> range:
        """Return the sample numbers of a step (0 is the first) of all processes together."""
        return range(step * self.batch_size, (step + 1) * self.batch_size)

    def __len__(self) -> int:
        return len(self.steps) * self.accumulate

    def __iter__(self) -> Iterator[list[int]]:
        share = self.batch_size // self.world
        for step in self.steps:
            first = self.samples(step).start + self.rank * share
            for start in range(first, first + share, self.micro_batch_size):
                yield list(range(start, start + self.micro_batch_size))


class OnceEach(Sampler):
    """A batch sampler: each of the first samples once, in equally many batches per process.

    The last batch may be smaller. Where none of its samples is left for a process, the process gets
    one that does not count, since all must make the same number of forwards (`counts`).

    Args:
        number: Samples over all processes.
        size: Samples per forward of one process, at most.
        rank: This process, from 0.
        world: Number of processes.
    """

    def __init__(self, number: int, size: int, rank: int = 0, world: int = 1):
        self.number, self.size, self.rank, self.world = number, size, rank, world

    def __len__(self) -> int:
        return math.ceil(self.number / (self.size * self.world))

    def counts(self, index: int) -> bool:
        """Return whether the samples of batch `index` are this process's own."""
        return index * self.size * self.world + self.rank < self.number

    def __iter__(self) -> Iterator[list[int]]:
        step = self.size * self.world
        for index in range(len(self)):
            stop = min((index + 1) * step, self.number)
            yield [*range(index * step + self.rank, stop, self.world)] or [0]


def _generator(seed: int, number: int, purpose: int) -> torch.Generator:
    """Return a separate random generator for each (seed, number, purpose)."""
    # torch's CPU generator uses only 32 bits of its seed, so these must depend on all three.
    key = hashlib.blake2b(f"{seed} {number} {purpose}".encode(), digest_size=4).digest()
    return torch.Generator().manual_seed(int.from_bytes(key, "little"))
