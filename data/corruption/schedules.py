"""Noise schedules: masking rates, suffix lengths and noise ratios, drawn for each sample."""

import torch
from torch import Generator, Tensor


def uniform_times(count: int, low: float, generator: Generator) -> Tensor:
    """Stratified masking rates t in (low, 1], [count], in random order.

    One uniform offset shifts an even grid, so the blocks of a row cover all rates; each rate alone
    is uniform. As in the low-discrepancy sampler of variational diffusion (arXiv 2107.00630).
    """
    offset = torch.rand((), generator=generator, dtype=torch.float64)
    grid = (offset + torch.arange(count, dtype=torch.float64) / count) % 1
    grid = 1 - grid[torch.randperm(count, generator=generator)] * (1 - low)
    return grid.float()


def masked_at(times: Tensor, length: int, generator: Generator) -> Tensor:
    """Random masks bool [A, length]: a token of block i is masked with probability times[i]."""
    return torch.rand(len(times), length, generator=generator) < times[:, None]


def suffix_lengths(count: int, shortest: int, longest: int, generator: Generator) -> Tensor:
    """Suffix lengths R ~ U{shortest, ..., longest}, [count] (DEER, arXiv 2512.15176, 3.1.2).

    Raises:
        ValueError: unless 1 <= shortest <= longest.
    """
    if not 1 <= shortest <= longest:
        raise ValueError(f"shortest={shortest} is not allowed: it must be in 1..{longest}")
    return torch.randint(shortest, longest + 1, (count,), generator=generator)


def progressive_times(
    count: int, window: int, order: str, generator: Generator, t_max: float | None = None
) -> Tensor:
    """The progressive noise schedule of pcLLM (Eq. 7 and section 4.3): a noise ratio per block.

    Args:
        count: number of consecutive blocks.
        window: w, blocks per cycle; ratios are from W = (0, 1/w, ..., (w-1)/w).
        order: 'linear' is t_i = W[i mod w], 'reverse' runs each cycle from the noisiest block
            down, 'random' draws each t_i from W.
        generator: used by 'random' only.
        t_max: ratio of the noisiest block of a cycle, to which ratios rise evenly from 0; None:
            (w-1)/w, which gives the W above. Table 4 has t_min = 0 and t_max = 1.

    Returns:
        Noise ratios t [count]. Example: count 5, window 2, linear: 0, 1/2, 0, 1/2, 0.

    Raises:
        ValueError: for a window below 1, an unknown order, or a t_max outside (0, 1].
    """
    if window < 1:
        raise ValueError(f"window={window} is not allowed: it must be at least 1 block")
    if t_max is not None and not 0 < t_max <= 1:
        raise ValueError(f"t_max={t_max} is not allowed: it must be in (0, 1]")
    step = torch.arange(count) % window
    if order == "reverse":
        step = window - 1 - step
    elif order == "random":
        step = torch.randint(window, (count,), generator=generator)
    elif order != "linear":
        raise ValueError(f"unknown order {order!r}. Choose from ['linear', 'random', 'reverse']")
    if t_max is None:
        return step / window
    return step / max(1, window - 1) * t_max


def golden(n: int) -> float:
    """Term n of the golden-ratio low-discrepancy sequence in [0, 1): frac((n + 1/2) / phi).

    Any run of consecutive terms covers [0, 1) evenly, so the sequence needs to know neither the
    batch size nor the process that draws a sample.

    >>> [round(golden(n), 2) for n in range(4)]
    [0.31, 0.93, 0.55, 0.16]
    """
    return (n + 0.5) * 0.6180339887498949 % 1


def widening(start: float, rates: tuple[float, float], done: float) -> tuple[float, float]:
    """The masking rates of a curriculum: linear from (start, start) to `rates`.

    Source: AS-ARM (arXiv 2504.20456), appendix E.3.

    Args:
        start: masked fraction at the beginning.
        rates: lowest and highest masked fraction at the end.
        done: completed fraction of the curriculum, 0 to 1.

    Returns:
        Lowest and highest masked fraction now.

    >>> widening(0.5, (0.75, 1.0), 0.5)
    (0.625, 0.75)
    """
    low, high = rates
    return start + (low - start) * done, start + (high - start) * done
