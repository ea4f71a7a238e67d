"""Attention of few queries on the CPU, as compiled loops (numba, where it is installed).

The fused kernel rounds a query's result as the number of queries beside it and the length of the
longest row have it. Here it has the same bits whoever is beside it: sums run over a query's keys in
their order, and keys that the mask hides between them add nothing. So in bfloat16 the passes that
verify drafts choose what plain decoding's do, and a batch what each of its requests does alone.
"""

import threading
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

MOST = 256  # queries a head of keys
_LOCK = threading.Lock()  # some of numba's thread pools must not be entered twice at a time


@cache
def _loops() -> Callable | None:
    """The function of (threads, ...), compiled at its first call; None without numba."""
    try:
        import numba
        import numpy as np
    except ImportError:
        return None
    f32, u32 = np.float32, np.uint32
    # A sum over the numbers of one key is in any order, but in the same one each time.
    any_order = {"fastmath": {"reassoc", "contract", "nsz", "nnan"}, "error_model": "numpy"}
    in_order = {"fastmath": {"contract"}, "error_model": "numpy"}
    log2_e, log_2, log_2_rest = f32(1.44269504), f32(0.693359375), f32(-2.12194440e-4)
    one, half, fixed = f32(1), f32(0.5), f32(2**32)

    @numba.njit(inline="always")
    def number(bits):  # of a bfloat16
        return u32(u32(bits) << u32(16)).view(f32)

    @numba.njit(inline="always")
    def rounded(x):  # to a bfloat16, ties to even, as the fused kernel rounds weights
        bits = f32(x).view(u32)
        odd = u32(bits >> u32(16)) & u32(1)
        return u32(u32(bits + u32(0x7FFF) + odd) & u32(0xFFFF0000)).view(f32)

    @numba.njit(inline="always")
    def exp(x):  # of x <= 0, to 1e-7; numpy's is no vector instruction
        whole = np.floor(x * log2_e + half)
        r = x - whole * log_2 - whole * log_2_rest
        y = f32(1.9875691500e-4)
        y = y * r + f32(1.3981999507e-3)
        y = y * r + f32(8.3334519073e-3)
        y = y * r + f32(4.1665795894e-2)
        y = y * r + f32(1.6666665459e-1)
        y = y * r + half
        y = y * r * r + r + one
        power = u32(u32(np.int32(max(whole, f32(-126))) + np.int32(127)) << u32(23)).view(f32)
        return y * power if x > f32(-87) else f32(0)

    @numba.njit
    def readable(mask):  # keys up to the last one that any query may read
        end = 0
        for q in range(mask.shape[0]):
            for k in range(mask.shape[1] - 1, end - 1, -1):
                if number(mask[q, k]) > -np.inf:
                    end = k + 1
                    break
        return end

    @numba.njit(**any_order)
    def weigh(query, keys, mask, scale, weights, totals):
        """weights: [queries, keys], exp(score - the largest); totals: their sums."""
        scale = f32(scale)
        for k in range(keys.shape[0]):
            key = keys[k]
            for four in range(query.shape[0] // 4):
                q = 4 * four
                q0, q1, q2, q3 = query[q], query[q + 1], query[q + 2], query[q + 3]
                s0 = s1 = s2 = s3 = f32(0)
                for d in range(query.shape[1]):
                    x = number(key[d])
                    s0 += q0[d] * x
                    s1 += q1[d] * x
                    s2 += q2[d] * x
                    s3 += q3[d] * x
                weights[q, k], weights[q + 1, k] = s0, s1
                weights[q + 2, k], weights[q + 3, k] = s2, s3
        for q in range(totals.shape[0]):
            hidden, row, largest = mask[q % mask.shape[0]], weights[q], f32(-np.inf)
            for k in range(keys.shape[0]):
                row[k] = row[k] * scale + number(hidden[k])
                largest = max(largest, row[k])
            total = np.int64(0)  # of integers, so that the order does not matter
            if largest > -np.inf:
                for k in range(keys.shape[0]):
                    weight = exp(row[k] - largest)
                    row[k] = rounded(weight)
                    total += np.int64(weight * fixed)
            else:
                row[:] = f32(0)
            totals[q] = f32(total) / fixed

    @numba.njit(**in_order)
    def add(weights, values, out):
        """out [queries, D]: zeros, to which weights times values are added, key by key."""
        keys = values.shape[0]
        for four in range(keys // 4):
            k = 4 * four
            v0, v1, v2, v3 = values[k], values[k + 1], values[k + 2], values[k + 3]
            for q in range(out.shape[0]):
                w0, w1, w2, w3 = weights[q, k : k + 4]
                row = out[q]
                for d in range(out.shape[1]):
                    x = row[d] + w0 * number(v0[d]) + w1 * number(v1[d])
                    row[d] = x + w2 * number(v2[d]) + w3 * number(v3[d])
        for k in range(keys // 4 * 4, keys):
            value = values[k]
            for q in range(out.shape[0]):
                weight, row = weights[q, k], out[q]
                for d in range(out.shape[1]):
                    row[d] += weight * number(value[d])

    @numba.njit(parallel=True)
    def attention(query, keys, values, lines, mask, scale, out):
        batch, heads, queries, size = out.shape
        for i in numba.prange(batch * heads):
            b, h = i // heads, i % heads
            end = readable(mask[b])
            weights = np.empty((query.shape[2], end), f32)
            totals = np.empty(queries, f32)
            key, value = b * lines[0] + h * lines[1], b * lines[2] + h * lines[3]
            weigh(query[b, h], keys[key : key + end], mask[b], scale, weights, totals)
            add(weights, values[value : value + end], out[b, h])
            for q in range(queries):
                if totals[q] > 0:
                    for d in range(size):
                        out[b, h, q, d] /= totals[q]

    def attend(threads, *given):
        numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))
        attention(*given)

    return attend


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
    batch, heads, _, size = key.shape
    asked = query.reshape(batch, heads, -1, size).float()
    found = torch.zeros_like(asked)
    asked = torch.constant_pad_nd(asked, (0, 0, 0, -asked.shape[2] % 4))  # they come in fours
    (keys, key_lines), (values, value_lines) = _lines(key), _lines(value)
    given = asked.numpy(), keys, values, (*key_lines, *value_lines), _bits(mask[:, 0].contiguous())
    with _LOCK:
        _loops()(torch.get_num_threads(), *given, scale, found.numpy())
    return found.to(query.dtype).reshape(query.shape)


def _bits(x: Tensor):
    return x.view(torch.uint16).numpy()


def _lines(states: Tensor):
    """Bits [n, D] of all that keys or values span; lines from a row and a head to the next."""
    size = states.shape[3]
    steps = [stride // size for stride in states.stride()[:3]]
    count = 1 + sum((n - 1) * step for n, step in zip(states.shape, steps))
    return _bits(states.as_strided((count, size), (size, 1))), steps[:2]
