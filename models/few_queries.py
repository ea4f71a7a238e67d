"""Attention of few queries on the CPU, as compiled loops (numba, where it is installed).

The fused kernel rounds a query's result as the number of queries beside it and the length of the
longest row have it. Here it has the same bits whoever is beside it: sums run over a query's keys in
their order, and keys that the mask hides between them add nothing. So in bfloat16 the passes that
verify drafts choose what plain decoding's do, and a batch what each of its requests does alone.
"""

import threading
from functools import cache
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

MOST = 256  # queries a head of keys
_LOCK = threading.Lock()  # some of numba's thread pools must not be entered twice at a time


@cache
def loops() -> ModuleType | None:
    """`models.loops`; None without numba, which takes half a second to load."""
    try:
        from models import loops as found
    except ImportError:  # of a bundle's copy, whose package has been taken out of Python again
        return None
    return None if found.numba is None else found


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
        and loops() is not None
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
    asked = query.reshape(batch, heads, -1, size).contiguous()
    found = torch.empty_like(asked)
    (keys, key_lines), (values, value_lines) = _lines(key), _lines(value)
    lines, hidden = (*key_lines, *value_lines), bits(mask[:, 0].contiguous())
    compiled, threads = loops(), torch.get_num_threads()
    with _LOCK:
        compiled.numba.set_num_threads(min(threads, compiled.numba.config.NUMBA_NUM_THREADS))
        compiled.attention(bits(asked), keys, values, lines, hidden, scale, bits(found))
        # numba's pool is OpenMP's, which it sets as it begins.
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
    return found.view(query.shape)


def bits(x: Tensor) -> np.ndarray:
    """The bits of bfloat16 numbers, as the loops take them; the memory is the tensor's."""
    return x.view(torch.uint16).numpy()


def _lines(states: Tensor):
    """Bits [n, D] of all that keys or values span; lines from a row and a head to the next."""
    size = states.shape[3]
    steps = [stride // size for stride in states.stride()[:3]]
    count = 1 + sum((n - 1) * step for n, step in zip(states.shape, steps))
    return bits(states.as_strided((count, size), (size, 1))), steps[:2]
