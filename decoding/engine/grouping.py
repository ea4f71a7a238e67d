"""Rows of a batch in groups: what is computed for as long a row as the longest of its group."""

from collections.abc import Sequence

# What a pass costs besides its tokens, above all for reading the weights, as tokens that a device
# computes in that time. Of the CPU alone it is known; others make as few passes as may be.
PASS_COSTS, FEW_PASSES = {"cpu": 128}, 2**40
CALL_COST = 256  # of attention on the CPU: what a call costs, as keys that it reads in that time
_BLOCKS = 16  # of rows that `key_groups` tells apart at the most


def cheapest_groups(sizes: Sequence[int], cost: float, most: int | None = None) -> list[slice]:
    """Consecutive items in groups that cost the least together.

    Args:
        sizes: Of the items. Each item of a group costs as much as the group's largest.
        cost: Of a group besides.
        most: What a group of several items may cost at the most, without that; None: anything.

    Returns:
        The groups, in their order.

    >>> cheapest_groups([10, 12, 90, 95], cost=20), cheapest_groups([10, 12, 90, 95], cost=200)
    ([slice(0, 2, None), slice(2, 4, None)], [slice(0, 4, None)])
    """
    best = [(0, 0)]  # of the first items: what they cost, where their last group begins
    for end in range(1, len(sizes) + 1):
        found, largest = [], 0
        for start in reversed(range(end)):
            largest = max(largest, sizes[start])
            own = (end - start) * largest
            if most is None or own <= most or start == end - 1:
                found.append((best[start][0] + cost + own, start))
        best.append(min(found))
    groups, end = [], len(sizes)
    while end:
        groups.append(slice(best[end][1], end))
        end = groups[-1].start
    return groups[::-1]


def prefill_groups(lengths: Sequence[int], cost: int, most: int | None = None) -> list[list[int]]:
    """Prompts that are prefilled together, so that all passes cost the least together.

    A pass over some prompts computes as many tokens of each as the longest has: the others are
    padded.

    Args:
        lengths: Of the prompts, in tokens.
        cost: Of a pass besides its tokens, in tokens.
        most: Tokens of a pass of several prompts at the most, padding included; None: any number.

    Returns:
        The prompts' numbers, pass by pass, in the order of their lengths.

    >>> prefill_groups([90, 10, 95, 12], cost=20)
    [[1, 3], [0, 2]]
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    return [order[group] for group in cheapest_groups([lengths[n] for n in order], cost, most)]


def key_groups(ends: Sequence[int], cost: int = CALL_COST) -> list[tuple[slice, int]] | None:
    """Rows of a pass whose attention is one call, as rows differ in how many keys they may read.

    Args:
        ends: Of each row, the number of first slots that it may read.
        cost: Of a call besides its keys, in keys.

    Returns:
        Rows, and the slots that the call reads; None: one call for all is best.
    """
    if len(ends) * max(ends) - sum(ends) <= cost:
        return None
    step = -(-len(ends) // _BLOCKS)
    largest = [max(ends[i : i + step]) for i in range(0, len(ends), step)]
    rows = [slice(g.start * step, g.stop * step) for g in cheapest_groups(largest, cost / step)]
    return [(r, max(ends[r])) for r in rows] if len(rows) > 1 else None
