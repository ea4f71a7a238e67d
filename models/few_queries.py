"""Attention of few queries on the CPU, as compiled loops (numba, where it is installed).

The fused kernel's rounding depends on the number of queries and on the longest row. Here a query
has the same bits in any batch: sums run over its keys in their order, and hidden keys add nothing.
So in bfloat16 verification chooses the same tokens as plain decoding, and a batch the same as each
of its requests alone. With `models.bfloat16_loops` prompts are attended to by loops too.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

MAX_QUERIES = 256  # queries a head of keys, without loops of products
_LOCK = threading.Lock()  # some of numba's thread pools must not be entered twice at a time


@cache
def loops() -> ModuleType | None:
    """Return `models.loops`, which takes half a second to load; None without numba."""
    try:
        from models import loops as found
    except ImportError:  # of a bundle's copy, whose package has been taken out of Python again
        return None
    return None if found.numba is None else found


def loops_on(device: torch.device) -> ModuleType | None:
    """Return `loops` for a device; None where they do not run."""
    return loops() if device.type == "cpu" else None


@cache
def bfloat16_loops() -> ModuleType | None:
    """Return `models.bfloat16_loops`; None without numba, or where the CPU has no use for them."""
    if loops() is None:
        return None
    try:
        from models import bfloat16_loops as found
    except ImportError:  # as above
        return None
    return found if found.runs() else None


def taken(batch: int, queries: int, heads: int, size: int, mask: Tensor) -> bool:
    """Return whether the loops take so many queries of so many heads [size] with this mask."""
    return (
        (queries <= MAX_QUERIES * heads or _multiplied(size) is not None)
        and mask.dtype == torch.bfloat16
        and mask.shape[:2] == (batch, 1)
        and not torch.is_grad_enabled()
        and loops() is not None
    )


def attends(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> bool:
    """Return whether `attend` supports these tensors and numba is installed."""
    return (
        query.device.type == "cpu"
        and key.shape == value.shape
        and query.dtype == key.dtype == value.dtype == torch.bfloat16
        and key.stride()[2:] == value.stride()[2:] == (key.shape[3], 1)
        and taken(len(query), query.shape[1] * query.shape[2], key.shape[1], key.shape[3], mask)
    )


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Compute softmax(scale q k^T + mask) v [B, G * heads, Q, D] of bfloat16 queries.

    `query` is [B, G * heads, Q, D]; head g reads the keys of head g / G. `key` and `value` are [B,
    heads, K, D], slices of a longer cache; `mask` is additive, [B, 1, Q, K]. The result is 0 where
    a query may read no key.
    """
    batch, _, length, size = query.shape
    asked = query.transpose(1, 2).reshape(batch * length, -1, size).contiguous()
    found = torch.empty_like(asked)
    (keys, *key_lines), (values, *value_lines) = _lines(key), _lines(value)
    lines, hidden = (key.shape[1], *key_lines, *value_lines), _masks(mask)
    compiled, starts = loops(), np.arange(batch + 1) * length
    assert compiled is not None  # as `attends` has made sure
    with pool(compiled):
        _attending(size).attention(
            bits(asked), starts, keys, values, lines, hidden, scale, bits(found)
        )
    return found.view(batch, length, -1, size).transpose(1, 2)


def rotated(
    states: Tensor,
    angles: tuple[Tensor, Tensor],
    starts: np.ndarray,
    slots: Tensor,
    memory: tuple[Tensor, Tensor],
    mask: Tensor,
    scale: float,
) -> Tensor:
    """Rotate queries and keys, keep keys and values in a cache, and attend: [n, heads, D].

    It is `attend` in one call, of states [n, all heads, D] of the tokens of all rows, row after
    row, and a cache's memory of keys and of values [rows, key-value heads, slots, D].

    Args:
        states: They may have more rows, of padding, where zeros are found.
        angles: Cosines and sines, of n angles [D] each.
        starts: [rows + 1], the number of each row's first token, and n.
        slots: Where a token's key and value go, n of them.
        mask: Additive, of n tokens over the first K slots [K].
    """
    others = states.shape[1] - 2 * memory[0].shape[1]
    found = states.new_zeros(len(states), others, states.shape[2])
    given, compiled = for_loops(angles, starts, slots, memory, mask), loops()
    assert compiled is not None  # as the caller has made sure
    with pool(compiled):
        _attending(states.shape[2]).rotated_attention(bits(states), *given, scale, bits(found))
    return found


def for_loops(
    angles: tuple[Tensor, Tensor],
    starts: np.ndarray,
    slots: Tensor,
    memory: tuple[Tensor, Tensor],
    mask: Tensor,
) -> tuple[np.ndarray, ...]:
    """Return these arguments of `rotated` as the loops take them: bits but for starts and slots."""
    cos, sin = (bits(x.reshape(-1, 1, x.shape[-1]).contiguous()) for x in angles)
    return cos, sin, starts, slots.flatten().numpy(), *map(bits, memory), _masks(mask)


@contextmanager
def pool(compiled: ModuleType) -> Iterator[int]:
    """Let parallel loops use torch's number of threads, which is returned."""
    threads = torch.get_num_threads()
    with _LOCK:
        compiled.numba.set_num_threads(min(threads, compiled.numba.config.NUMBA_NUM_THREADS))
        yield threads
        # numba's pool is OpenMP's, which it sets as it begins.
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)


def _attending(size: int) -> Any:
    """Return the loops that attend with heads of so many numbers."""
    return _multiplied(size) or loops()


def _multiplied(size: int) -> ModuleType | None:
    """Return the loops of products for heads of so many numbers, which take any number of queries.

    None where there are none.
    """
    here = bfloat16_loops()
    return None if here is None or size % here.GROUP else here


def bits(x: Tensor) -> np.ndarray:
    """Return the bits of bfloat16 numbers, in the tensor's memory, as the loops take them."""
    return x.view(torch.uint16).numpy()


def _masks(mask: Tensor) -> np.ndarray:
    """Return the bits [n, K] of additive masks of n tokens."""
    return bits(mask.reshape(-1, mask.shape[-1]).contiguous())


def _lines(states: Tensor) -> tuple[np.ndarray, int, int]:
    """Return the bits [n, D] that keys or values span, and the lines to the next row and head."""
    batch, heads, length, size = states.shape
    row, head = (stride // size for stride in states.stride()[:2])
    count = (batch - 1) * row + (heads - 1) * head + length
    return bits(states.as_strided((count, size), (size, 1))), row, head
