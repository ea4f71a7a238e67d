"""Noise schedules: masking rates and noise ratios, drawn for each sample."""

from typing import Literal

import torch
from torch import Generator, Tensor

NoiseOrder = Literal["linear", "random", "reverse"]


def uniform_times(count: int, low: float, generator: Generator) -> Tensor:
    """Return stratified masking rates t in (low, 1], [count], in random order.

    One uniform offset shifts an even grid: each rate is uniform, and the blocks of a row cover all
    rates, as in the low-discrepancy sampler of variational diffusion (arXiv 2107.00630).
    """
    offset = torch.rand((), generator=generator, dtype=torch.float64)
    grid = (offset + torch.arange(count, dtype=torch.float64) / count) % 1
    grid = 1 - grid[torch.randperm(count, generator=generator)] * (1 - low)
    return grid.float()


def progressive_times(count: int, window: int, order: NoiseOrder, generator: Generator) -> Tensor:
    """Return pcLLM's progressive noise schedule (Eq. 7, section 4.3): noise ratios t [count].

    Example: count 5, window 2, linear: 0, 1/2, 0, 1/2, 0.

    Args:
        count: Number of consecutive blocks.
        window: w, blocks per cycle; ratios are from W = (0, 1/w, ..., (w-1)/w).
        order: 'linear' is t_i = W[i mod w], 'reverse' runs each cycle from the noisiest block
            down, 'random' draws each t_i from W.
        generator: Used by 'random' only.
    """
    step = torch.arange(count) % window
    if order == "reverse":
        step = window - 1 - step
    elif order == "random":
        step = torch.randint(window, (count,), generator=generator)
    return step / window


def golden(n: int) -> float:
    """Return term n of the golden-ratio low-discrepancy sequence: frac((n + 1/2) / phi).

    Consecutive terms cover [0, 1) evenly, whatever the batch size and the process that draws a
    sample.

    >>> [round(golden(n), 2) for n in range(4)]
    [0.31, 0.93, 0.55, 0.16]
    """
    return (n + 0.5) * 0.6180339887498949 % 1


def widening(start: float, rates: tuple[float, float], done: float) -> tuple[float, float]:
    """Return a curriculum's lowest and highest masking rate: from (start, start) to `rates`.

    `done`, 0 to 1, is the completed fraction (AS-ARM, arXiv 2504.20456, appendix E.3).

    >>> widening(0.5, (0.75, 1.0), 0.5)
    (0.625, 0.75)
    """
    low, high = rates
    return start + (low - start) * done, start + (high - start) * done
