"""Draft trees against every prefix of three tokens."""

from itertools import product

import pytest
from hypothesis import strategies as st

numbers = st.lists(st.floats(-3, 3), min_size=3, max_size=3)  # logits or scores of the tokens


def assert_likeliest(found, chance, k, nodes):
    """A tree's nodes are the `nodes` likeliest of all prefixes of three tokens up to length k."""
    every = (prefix for n in range(1, k + 1) for prefix in product(range(3), repeat=n))
    best = sorted(map(chance, every), reverse=True)[:nodes]
    prefixes = []
    for path in found.path:
        prefixes.append([found.token[i] for i in range(len(found.path)) if path >> i & 1])
    assert sorted(map(chance, prefixes), reverse=True) == pytest.approx(best)
