"""Grouping of prompts that are prefilled together."""

from collections.abc import Sequence

# Cost of a pass besides its tokens, above all of reading the weights, in tokens that a device
# computes in that time. It is known for the CPU only; others make as few passes as possible.
PASS_COSTS, FEW_PASSES = {"cpu": 24}, 2**40


def prefill_groups(lengths: Sequence[int], cost: int, most: int | None = None) -> list[list[int]]:
    """Group prompts, by number and in the order of their lengths, so that all passes cost least.

    A pass pads every prompt to the longest, and costs its tokens and `cost` more. A pass of several
    prompts has at most `most` tokens, with padding.

    >>> prefill_groups([90, 10, 95, 12], cost=20), prefill_groups([90, 10, 95, 12], cost=200)
    ([[1, 3], [0, 2]], [[1, 3, 0, 2]])
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    best = [(0, 0)]  # of the first prompts: what they cost, where their last group begins
    for end in range(1, len(order) + 1):
        found, longest = [], lengths[order[end - 1]]
        for start in reversed(range(end)):
            own = (end - start) * longest
            if most is None or own <= most or start == end - 1:
                found.append((best[start][0] + cost + own, start))
        best.append(min(found))
    groups, end = [], len(order)
    while end:
        start = best[end][1]
        groups.append(order[start:end])
        end = start
    return groups[::-1]
