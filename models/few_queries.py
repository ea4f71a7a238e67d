"""Attention of few queries on the CPU, as compiled loops (numba, where it is installed).

The fused kernel makes two small products for each head of each request, and takes longer to begin
them than to do them: sixteen requests of nine heads on three of keys, one token each after 285,
take 0.93 ms a layer. Loops that read every key and value once take 0.5 ms. They end with a
request's own last key, so its result has the same bits whoever is beside it.
"""

import threading
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

MOST = 6  # queries a head of keys: with more the fused kernel is as fast
_LOCK = threading.Lock()  # some of numba's thread pools must not be entered twice at a time


@cache
def _loops() -> tuple[Callable, Callable, Callable] | None:
    """The functions `(set_num_threads, scores, mean)`; None without numba."""
    try:
        import numba
        import numpy as np
    except ImportError:
        return None
    # Sums in any order, so that they are vectors. Infinities stay what they are.
    fast = {"fastmath": {"reassoc", "contract", "nsz", "arcp", "nnan"}, "error_model": "numpy"}

    @numba.njit(inline="always")
    def number(bits):  # of a bfloat16
        return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)

    @numba.njit(inline="always")
    def rounded(x):  # to a bfloat16's precision, ties to even
        bits = np.float32(x).view(np.uint32)
        odd = np.uint32(bits >> np.uint32(16)) & np.uint32(1)
        bits = np.uint32(bits + np.uint32(0x7FFF) + odd)
        return np.uint32(bits & np.uint32(0xFFFF0000)).view(np.float32)

    @numba.njit
    def readable(mask):  # keys up to the last one that any query may read
        end = 0
        for q in range(mask.shape[0]):
            for k in range(mask.shape[1] - 1, end - 1, -1):
                if number(mask[q, k]) > -np.inf:
                    end = k + 1
                    break
        return end

    @numba.njit(parallel=True, **fast)
    def scores(query, keys, lines, mask, scale, ends, out):
        batch, heads, queries, size = query.shape
        for i in numba.prange(batch * heads):
            b, h = i // heads, i % heads
            end = ends[i] = readable(mask[b])
            start = b * lines[0] + h * lines[1]
            asked, key, found = query[b, h], keys[start : start + end], out[b, h]
            for k in range(end):
                for q in range(queries):
                    total = np.float32(0)
                    for d in range(size):
                        total += asked[q, d] * number(key[k, d])
                    found[q, k] = total
            for q in range(queries):
                added, largest = mask[b, q % mask.shape[1]], np.float32(-np.inf)
                for k in range(end):
                    found[q, k] = found[q, k] * scale + number(added[k])
                    largest = max(largest, found[q, k])
                if largest > -np.inf:
                    for k in range(end):
                        found[q, k] -= largest

    @numba.njit(parallel=True, **fast)
    def mean(weights, values, lines, ends, out):
        batch, heads, queries, size = out.shape
        for i in numba.prange(batch * heads):
            b, h, end = i // heads, i % heads, ends[i]
            start = b * lines[0] + h * lines[1]
            value, given, found = values[start : start + end], weights[b, h], out[b, h]
            for k in range(end):
                for q in range(queries):
                    weight = rounded(given[q, k])  # as in the fused kernel
                    for d in range(size):
                        found[q, d] += weight * number(value[k, d])
            for q in range(queries):
                total = np.float32(0)
                for k in range(end):
                    total += given[q, k]
                if total > 0:
                    for d in range(size):
                        found[q, d] /= total

    return numba.set_num_threads, scores, mean


def attends(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> bool:
    """Whether `attend` is for these tensors, and numba is installed; they are those of `attend`."""
    states = query, key, value, mask
    return (
        query.device.type == "cpu"
        and query.shape[1] * query.shape[2] <= MOST * key.shape[1]
        and all(x.dtype == torch.bfloat16 for x in states)
        and all(x.stride()[2:] == (x.shape[3], 1) for x in (key, value))
        and len(mask) == len(query)
        and not torch.is_grad_enabled()
        and _loops() is not None
    )


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Attention of few queries; query head g reads the keys of head g / G.

    Args:
        query: bfloat16 [B, G * heads, Q, D], as the others.
        key, value: [B, heads, K, D], slices of a longer cache.
        mask: Additive, [B, 1, Q, K].
        scale: Of the scores.

    Returns:
        softmax(scale q k^T + mask) v [B, G * heads, Q, D]; zeros where a query may read no key.
    """
    set_num_threads, scores, mean = _loops()
    batch, heads, keys, size = key.shape
    asked = query.reshape(batch, heads, -1, size).float().contiguous()
    weights = asked.new_empty(*asked.shape[:3], keys)
    found, ends = torch.zeros_like(asked), torch.empty(batch * heads, dtype=torch.long)
    hidden = _bits(mask[:, 0].contiguous())
    with _LOCK:
        set_num_threads(torch.get_num_threads())
        scores(asked.numpy(), *_lines(key), hidden, scale, ends.numpy(), weights.numpy())
        weights.exp_()
        mean(weights.numpy(), *_lines(value), ends.numpy(), found.numpy())
    return found.to(query.dtype).reshape(query.shape)


def _bits(x: Tensor):
    return x.view(torch.uint16).numpy()


def _lines(states: Tensor):
    """Bits [n, D] of all that keys or values span; lines from a row and a head to the next."""
    size = states.shape[3]
    steps = [stride // size for stride in states.stride()[:3]]
    count = 1 + sum((n - 1) * step for n, step in zip(states.shape, steps))
    return _bits(states.as_strided((count, size), (size, 1))), (steps[0], steps[1])
