"""A spool is the sequence that it was made of."""

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.text.prompts import Spool

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)


@given(st.lists(JSON), st.slices(6))
def test_it_is_the_list(values, part):
    spool = Spool(iter(values))
    assert (len(spool), [*spool], [*reversed(spool)]) == (len(values), values, values[::-1])
    assert spool[part] == values[part]
    for i in range(-len(values), len(values)):
        assert spool[i] == values[i]
    with pytest.raises(IndexError):
        spool[len(values)]


def test_memory_holds_the_places_alone():
    texts = ({"prompt": "x" * 10_000, "number": i} for i in range(2_000))
    tracemalloc.start()
    spool = Spool(texts)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert sum(len(value["prompt"]) for value in spool) == 20_000_000
    assert peak < 1_000_000
