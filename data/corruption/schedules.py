"""Noise schedules: how much of a draft block is masked. Shared by losses and samplers."""

import torch
from torch import Generator, Tensor


def uniform_times(count: int, low: float, generator: Generator) -> Tensor:
    """`count` masking rates t in (low, 1], spread evenly (low discrepancy): [count].

    One uniform offset shifts an even grid, so that a row's blocks cover all rates.
    """
    offset = torch.rand((), generator=generator, dtype=torch.float64)
    grid = (offset + torch.arange(count, dtype=torch.float64) / count) % 1
    grid = 1 - grid[torch.randperm(count, generator=generator)] * (1 - low)
    return grid.float()


def masked_at(times: Tensor, length: int, generator: Generator) -> Tensor:
    """Each of `length` tokens is masked with probability t: times [A] -> bool [A, length]."""
    return torch.rand(len(times), length, generator=generator) < times[:, None]


def suffix_lengths(count: int, shortest: int, longest: int, generator: Generator) -> Tensor:
    """R ~ U(shortest, longest), whole numbers: [count]. DEER (arXiv 2512.15176), section 3.1.2."""
    if not 1 <= shortest <= longest:
        raise ValueError(f"shortest={shortest} is not allowed: it must be in 1..{longest}")
    return torch.randint(shortest, longest + 1, (count,), generator=generator)


def progressive_times(count: int, window: int, order: str, generator: Generator) -> Tensor:
    """Noise ratios t_1..t_count of consecutive blocks, of W = {0, 1/w, ..., (w-1)/w}: [count].

    Source: pcLLM, Eq. 7 and section 4.3. order: 'linear' is t_i = W[i mod w]; 'reverse' the same
    windows from the noisiest down; 'random' draws each t_i from W.
    Example: count 5, window 2: linear 0, 1/2, 0, 1/2, 0.
    """
    if window < 1:
        raise ValueError(f"window={window} is not allowed: it must be at least 1 block")
    step = torch.arange(count) % window
    if order == "reverse":
        step = window - 1 - step
    elif order == "random":
        step = torch.randint(window, (count,), generator=generator)
    elif order != "linear":
        raise ValueError(f"unknown order {order!r}. Choose from ['linear', 'random', 'reverse']")
    return step / window


def golden(n: int) -> float:
    """Number n of a sequence in [0, 1) of which any stretch is spread evenly (low discrepancy).

    The additive recurrence frac((n + 1/2) / phi): it needs neither the size of a batch nor its
    place among processes.

    >>> [round(golden(n), 2) for n in range(4)]
    [0.31, 0.93, 0.55, 0.16]
    """
    return (n + 0.5) * 0.6180339887498949 % 1


def widening(start: float, rates: tuple[float, float], done: float) -> tuple[float, float]:
    """A curriculum's rates: both ends go linearly from `start` to `rates` as done goes to 1.

    AS-ARM (arXiv 2504.20456), appendix E.3.

    >>> widening(0.5, (0.75, 1.0), 0.5)
    (0.625, 0.75)
    """
    low, high = rates
    return start + (low - start) * done, start + (high - start) * done
