"""The n-grams of earlier texts against counting by hand, and what is kept of them."""

from copy import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decoding.drafting.ngrams import MOST, NEGLIGIBLE, N, Ngrams

V = 5
texts = st.lists(st.lists(st.integers(0, V - 1), max_size=30), max_size=4)


def counted(given, *kept):
    ngrams = Ngrams(V, *(kept or (1000,)))
    ngrams.add(given)
    return ngrams


def by_hand(given, suffix, rest=1.0):
    """Interpolate the counts of the last 3, 2 and 1 tokens, as the docstring has it."""
    n = len(suffix)
    if not n or rest < NEGLIGIBLE:
        return {}
    rows = [text[i - n : i + 1] for text in given for i in range(N, len(text))]
    after = [row[-1] for row in rows if row[:-1] == list(suffix)]
    left = len({*after}) / (len(after) + len({*after})) if after else 1.0
    shorter = by_hand(given, suffix[1:], rest * left)
    tokens = {*after, *shorter}
    whole = len(after) or 1
    return {v: (1 - left) * after.count(v) / whole + left * shorter.get(v, 0) for v in tokens}


@settings(max_examples=80, deadline=None)
@given(texts, st.tuples(*[st.integers(0, V - 1)] * N))
def test_probabilities_are_those_of_counting_by_hand(given, suffix):
    ngrams = counted(given)
    for length in range(1, N + 1):
        found = ngrams.after(suffix[-length:])
        assert found == pytest.approx(by_hand(given, suffix[-length:]))
        assert sum(found.values()) < 1


@settings(max_examples=40, deadline=None)
@given(texts, st.tuples(*[st.integers(0, V - 1)] * N))
def test_texts_one_by_one_are_the_same(given, suffix):
    apart = counted([])
    for text in given:
        apart.add([text])
    assert apart.after(suffix) == counted(given).after(suffix)


def test_longer_suffixes_are_read_to_their_last_tokens():
    ngrams = counted([[1, 2, 3, 4]])
    assert ngrams.after((0, 0, 0, 1, 2, 3)) == ngrams.after((1, 2, 3)) != {}
    assert ngrams.after((4, 4, 4)) == {}


def test_the_oldest_tokens_go():
    ngrams = counted([[0, 0, 0, 1]], 8)
    for _ in range(6):
        ngrams.add([[2, 2, 2, 3, 4]])
    assert len(ngrams) <= 10
    assert ngrams.after((0, 0, 0)) == {}
    assert ngrams.after((2, 2, 2)) == pytest.approx({3: 1.0}, abs=0.35)


def test_nothing_is_kept_where_nothing_may_be():
    ngrams = counted([[0, 1, 2, 3, 4]], 0)
    assert len(ngrams) == 0
    assert ngrams.after((0, 1, 2)) == {}


def test_a_copy_learns_by_itself():
    first = counted([[0, 1, 2, 3]])
    second = copy(first)
    assert second.after((0, 1, 2)) == first.after((0, 1, 2))
    second.add([[0, 1, 2, 4]] * 3)
    assert 4 not in first.after((0, 1, 2))
    assert second.after((0, 1, 2))[4] > second.after((0, 1, 2))[3]


def test_the_latest_tokens_after_a_context_count():
    ngrams = counted([[1, 1, 1, 2]] * 10 + [[1, 1, 1, 3], [1, 1, 1, 4]] * MOST, 10**6)
    found = ngrams.after((1, 1, 1))
    assert found[3] == found[4] == pytest.approx(1 / 2, abs=NEGLIGIBLE)
    assert 2 not in found
