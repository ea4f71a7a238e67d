"""Prompts in groups: no other groups cost less."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoding.engine.grouping import prefill_groups


def computed(lengths, groups):
    return sum(len(group) * max(lengths[n] for n in group) for group in groups)


@pytest.mark.slow
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    cost=st.integers(0, 12),
    most=st.none() | st.integers(1, 30),
)
def test_no_other_groups_cost_less(lengths, cost, most):
    """Of all ways to put the prompts into passes, not only those in the order of their lengths."""
    groups = prefill_groups(lengths, cost, most)
    assert sorted(n for group in groups for n in group) == [*range(len(lengths))]

    def allowed(groups):
        of_several = [[group] for group in groups if len(group) > 1]
        return most is None or all(computed(lengths, group) <= most for group in of_several)

    ways = product(range(len(lengths)), repeat=len(lengths))
    others = [[[n for n, g in enumerate(way) if g == i] for i in {*way}] for way in ways]
    least = min(computed(lengths, o) + cost * len(o) for o in others if allowed(o))
    assert allowed(groups)
    assert computed(lengths, groups) + cost * len(groups) == least
