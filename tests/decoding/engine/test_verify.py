"""The keyed choice: the first of the largest sums of a logit and its noise."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decoding.engine import verify
from decoding.engine.verify import choose
from models import few_queries, loops

needs_numba = pytest.mark.skipif(few_queries.loops() is None, reason="needs numba")
# Few values, so that many sums are equal.
VALUES = torch.tensor([-torch.inf, -2.0, -1.0, -0.0, 0.0, 0.5, 1.0, 3e38])


def drawn(seed, *shapes):
    draw = torch.Generator().manual_seed(seed)
    return [VALUES[torch.randint(len(VALUES), shape, generator=draw)] for shape in shapes]


def by_formula(logits, noise, of):
    rows = torch.stack([g[i] for g, i in zip(noise, of)])
    return torch.from_numpy((logits + rows).numpy().argmax(-1))


@settings(max_examples=100, deadline=None)
@given(
    batch=st.integers(1, 3),
    rows=st.integers(1, 4),
    size=st.integers(1, 9) | st.sampled_from([loops.PIECE, loops.PIECE + 1, 3 * loops.PIECE + 7]),
    seed=st.integers(0, 99),
)
def test_it_is_the_first_of_the_largest_sums(batch, rows, size, seed):
    logits, noise = drawn(seed, (batch, rows, size), (batch, 5, size))
    noise[noise.isinf()] = -1.0  # finite, as noise is
    of = torch.randint(5, (batch, rows), generator=torch.Generator().manual_seed(seed))
    assert torch.equal(choose(logits, noise, of), by_formula(logits, noise, of))
    in_turn = torch.arange(rows).expand(batch, -1)
    assert torch.equal(choose(logits, noise), by_formula(logits, noise, in_turn))


@needs_numba
def test_the_loop_is_used_and_its_sums_tell_rows_apart(monkeypatch):
    """Negative control: with another row's noise, and without the loop, which chooses the same."""
    draw = torch.Generator().manual_seed(0)
    logits, noise = (torch.randn(2, n, 50, generator=draw) for n in (3, 4))
    of = torch.tensor([[0, 1, 1], [3, 0, 2]])
    found = choose(logits, noise, of)
    assert not torch.equal(found, choose(logits, noise, (of + 1) % 4))
    monkeypatch.setattr(verify, "loops_on", lambda device: None)
    assert torch.equal(found, choose(logits, noise, of))
    monkeypatch.setattr(verify, "loops_on", lambda device: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        choose(logits, noise, of)


def test_other_types_choose_alike():
    draw = torch.Generator().manual_seed(0)
    logits, noise = (torch.randn(2, n, 50, generator=draw).double() for n in (3, 4))
    expected = by_formula(logits, noise, torch.arange(3).expand(2, -1))
    assert torch.equal(choose(logits, noise), expected)
    of = torch.tensor([[0, 1, 1], [3, 0, 2]])
    assert torch.equal(choose(logits, noise, of), by_formula(logits, noise, of))
    assert torch.equal(choose(logits, None), logits.argmax(-1))
