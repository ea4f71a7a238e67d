"""Prompts in groups that are prefilled together."""

from collections.abc import Sequence

# What a pass costs besides its tokens, above all for reading the weights, as tokens that a device
# computes in that time. Of the CPU alone it is known; others make as few passes as may be.
PASS_COSTS, FEW_PASSES = {"cpu": 24}, 2**40


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
