"""Rows in groups: no other groups cost less, and attention reads what the mask lets it read."""

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from decoding.engine import cache
from decoding.engine.cache import CachedNetwork
from decoding.engine.grouping import key_groups, prefill_groups
from models.attention import GROUPED, switch_attention
from models.masks import causal
from tests.support import tiny

V = 12


def computed(lengths, groups):
    return sum(len(group) * max(lengths[n] for n in group) for group in groups)


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


@given(ends=st.lists(st.integers(1, 300), min_size=1, max_size=40), cost=st.integers(0, 300))
def test_every_row_reads_all_that_it_may(ends, cost):
    groups = key_groups(ends, cost)
    if groups is None:
        return
    assert [n for rows, _ in groups for n in range(len(ends))[rows]] == [*range(len(ends))]
    assert all(max(ends[rows]) == keys for rows, keys in groups)
    read = sum(len(ends[rows]) * keys for rows, keys in groups)
    assert read + cost * len(groups) < len(ends) * max(ends) + cost


def passes(kind, groups=None):
    """Logits of two passes after 7, 3 and 5 tokens, and of each pass what rows may read."""
    model = tiny.causal_lm(V, kind=kind)
    switch_attention(model, GROUPED)
    network, used = CachedNetwork(model, causal, 16), []

    def counted(ends):
        used.append(ends)
        return groups(ends) if groups else None

    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        patch.setattr(cache, "key_groups", counted)
        tokens = torch.randint(V, (3, 8), generator=torch.Generator().manual_seed(0))
        lengths = torch.tensor([[7], [3], [5]])
        positions = torch.arange(8).expand(3, -1)
        network(tokens, positions, keep=1, padding=positions >= lengths)
        found = []
        for step in range(2):
            at = lengths + 2 * step + torch.arange(2)
            found.append(network(tokens[:, :2], at, keep=2).logits)
    return torch.stack(found), used


@pytest.mark.parametrize("kind", tiny.CLASSES)
def test_groups_change_nothing(kind):
    expected, ends = passes(kind)
    found, _ = passes(kind, lambda ends: key_groups(ends, cost=0))
    assert ends[1:] == [[9, 5, 7], [11, 7, 9]]
    assert len(key_groups(ends[1], cost=0)) == 3
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_a_key_too_few_is_seen():
    """Negative control."""

    def fewer(ends):
        return [(rows, keys - 1) for rows, keys in key_groups(ends, cost=0) or []] or None

    expected, _ = passes("llama")
    assert (passes("llama", fewer)[0] - expected).abs().max() > 1e-3
