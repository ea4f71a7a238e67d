from itertools import pairwise

import pytest
import torch

from data.corruption.any_subset import AnySubset
from data.corruption.orders import any_permutation, binary_lattice
from data.corruption.schedules import golden, widening
from data.rows.stream import Stream
from data.text.tokenizer import with_mask_token
from tests.support import tiny

N = 100
TOKENIZER = with_mask_token(tiny.tokenizer(5))


def row(padding=0, untrained=0):
    count = N - padding
    return {
        "input_ids": torch.arange(N) % 5,
        "document": torch.tensor([0] * (count // 2) + [1] * (count - count // 2) + [-1] * padding),
        "trained": torch.tensor([0] * untrained + [1] * (N - untrained)),
    }


def samples(corruption, count, **kind):
    stream = Stream([row(**kind)], 0, corruption)
    return [stream[n] for n in range(count)]


def hidden(corruption, count, **kind):
    return [int(x["masked"].sum()) for x in samples(corruption, count, **kind)]


def test_rates_are_kept_and_spread_evenly_over_any_stretch():
    counts = hidden(AnySubset([0.9, 0.99], TOKENIZER), 64)
    assert (min(counts), max(counts)) == (90, 99)
    for start in (0, 13, 40):
        stretch = sorted(counts[start : start + 10])
        assert max(b - a for a, b in pairwise(stretch)) <= 2


def test_golden_is_spread_better_than_draws():
    gaps = []
    for first in (0, 1000, 123456):
        x = sorted(golden(n) for n in range(first, first + 32))
        gaps.append(max(b - a for a, b in pairwise(x)))
    assert max(gaps) < 0.06
    draws = torch.rand(32, generator=torch.Generator().manual_seed(0)).sort().values
    assert draws.diff().max() > 0.06


def test_the_curriculum_widens_with_the_steps():
    corruption = AnySubset([0.9, 0.99], TOKENIZER, start=0.15, curriculum=10, batch_size=8)
    counts = hidden(corruption, 96)
    assert counts[0] == 15
    assert [widening(0.15, (0.9, 0.99), x) for x in (0, 1)] == [(0.15, 0.15), (0.9, 0.99)]
    assert 50 <= counts[40] <= 60
    assert min(counts[80:]) >= 90


def test_padding_and_untrained_tokens_are_never_hidden():
    for x in samples(AnySubset([1.0, 1.0], TOKENIZER), 3, padding=20, untrained=30):
        assert x["masked"].nonzero().flatten().tolist() == list(range(30, 80))
        assert x["document"][:N].tolist() == [0] * 80 + [-1] * 20
    for x in samples(AnySubset([1.0, 1.0], TOKENIZER), 3, untrained=N):
        assert x["masked"].sum() == 0


@pytest.mark.parametrize("order", ["lattice", "any"])
def test_the_order_of_a_sample(order):
    x = samples(AnySubset([0.5, 0.5], TOKENIZER, order=order), 1)[0]
    index, masked = x["index"][:N], x["masked"]
    assert set(index[~masked].tolist()) == {49}
    assert sorted(index[masked].tolist()) == list(range(50, 100))
    assert (index[masked].tolist() == list(range(50, 100))) == (order == "lattice")
    assert (x["input_ids"][N:] == TOKENIZER.mask_token_id).all()
    assert binary_lattice(~masked).shape == any_permutation(~masked, torch.Generator()).shape


def test_prompts_are_uniform_over_positions():
    many = torch.stack([x["masked"] for x in samples(AnySubset([0.5, 0.5], TOKENIZER), 400)])
    assert (many.float().mean(0) - 0.5).abs().max() < 0.12


@pytest.mark.parametrize(
    ("values", "named"),
    [({"rates": [0.9, 0.5]}, r"rates=\[0.9, 0.5\]"), ({"rates": [0.0, 0.5]}, r"rates=\[0.0, 0.5\]"),
     ({"rates": [0.9]}, r"rates=\[0.9\] .*two masked fractions"),
     ({"rates": [0.5, 1.0], "start": 2.0}, "start=2.0")],
)  # fmt: skip
def test_mistakes(values, named):
    with pytest.raises(ValueError, match=named):
        AnySubset(tokenizer=TOKENIZER, **values)


def test_a_tokenizer_without_a_mask_is_refused():
    with pytest.raises(ValueError, match="mask token"):
        AnySubset([0.5, 1.0], tiny.tokenizer(5))


def test_a_fraction_below_1_leaves_a_token():
    """XLNet's first query needs a key, also in a row of few tokens."""
    subset = AnySubset((0.15, 0.99), TOKENIZER)
    for number in range(200):
        hidden = [subset.hidden_count(number, candidates) for candidates in range(2, 80)]
        assert all(1 <= n < candidates for n, candidates in zip(hidden, range(2, 80)))
        assert subset.hidden_count(number, 1) == 1
    assert AnySubset((1.0, 1.0), TOKENIZER).hidden_count(0, 5) == 5
