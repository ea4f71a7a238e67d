"""Keyed randomness has the distributions that it claims and shares nothing between rows."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from decoding.engine.params import SamplingParams
from decoding.engine.randomness import _CACHED, KeyedRandomness
from decoding.samplers.plain import PlainSampler
from models import few_queries, loops
from tests.support import tiny

HUGE = [2**200 + 5, -1, -(2**62), 2**62 + 1, 0]


def p_value_of_plain_decoding(randomness=None, rows=4000, **warp):
    """Chi-square of sampled answers against the distribution of the model."""
    model = tiny.causal_lm(4, scale=1.0)
    params = SamplingParams(max_new_tokens=2, **warp)
    distribution = tiny.plain_distribution(model, [2, 0], params)
    sampler = PlainSampler(model, tiny.tokenizer(4))
    results = sampler.generate(
        [[2, 0]] * rows, params, seeds=list(range(rows)), randomness=randomness
    )
    counts = dict.fromkeys(distribution, 0)
    for r in results:
        counts[tuple(r.token_ids)] += 1  # an answer outside the support is an error here
    expected = [p * rows for p in distribution.values()]
    assert min(expected) > 5  # chi-square needs it
    return stats.chisquare(list(counts.values()), expected).pvalue


@pytest.mark.slow
@pytest.mark.parametrize("warp", [{}, {"temperature": 0.6}, {"top_k": 3}, {"verify": "rejection"}])
def test_plain_sampling_has_the_distribution_of_the_model(warp):
    assert p_value_of_plain_decoding(**warp) > 1e-3


class Biased(KeyedRandomness):
    """Wrong: token 0 gets a little more."""

    def gumbel(self, positions, vocabulary):
        noise = super().gumbel(positions, vocabulary)
        noise[..., 0] += 0.25
        return noise


class Flat(KeyedRandomness):
    """Wrong: noise that is too small, as if the temperature were lower."""

    def gumbel(self, positions, vocabulary):
        return 0.8 * super().gumbel(positions, vocabulary)


class Repeating(KeyedRandomness):
    """Wrong: every position has the same noise; a single token still has its distribution."""

    def gumbel(self, positions, vocabulary):
        return super().gumbel(torch.zeros_like(positions), vocabulary)


@pytest.mark.parametrize("wrong", [Biased, Flat, Repeating])
def test_wrong_noise_fails_the_same_test(wrong):
    assert p_value_of_plain_decoding(wrong(list(range(4000)))) < 1e-6


def test_uniform_numbers_are_uniform():
    randomness = KeyedRandomness(list(range(200)))
    u = torch.cat([randomness._uniform((200, 7, 3)).flatten() for _ in range(10)])
    assert u.min() > 0
    assert u.max() < 1
    assert stats.kstest(u.numpy(), "uniform").pvalue > 1e-3
    assert len(u.unique()) == len(u)


def test_accept_has_the_given_frequency():
    prob = torch.tensor([0.0, 0.1, 0.5, 0.93, 1.0]).expand(20_000, 5)
    counts = KeyedRandomness(list(range(20_000))).accept(prob).sum(0).tolist()
    assert counts[0] == 0
    assert counts[-1] == 20_000
    for count, p in zip(counts[1:-1], (0.1, 0.5, 0.93)):
        assert stats.binomtest(count, 20_000, p).pvalue > 1e-3


def test_gumbel_noise_is_gumbel():
    noise = KeyedRandomness(list(range(50))).gumbel(torch.arange(20).expand(50, -1), 60)
    assert noise.shape == (50, 20, 60)
    assert torch.isfinite(noise).all()
    assert stats.kstest(noise.flatten().numpy(), "gumbel_r").pvalue > 1e-3
    assert stats.kstest((noise * 1.1).flatten().numpy(), "gumbel_r").pvalue < 1e-6


def test_neighbouring_seeds_positions_and_tokens_are_uncorrelated():
    noise = KeyedRandomness(list(range(40))).gumbel(torch.arange(41).expand(40, -1), 43)
    for axis in range(3):
        for lag in (1, 2, 8):
            n = noise.shape[axis] - lag
            pairs = torch.stack(
                [noise.narrow(axis, 0, n).flatten(), noise.narrow(axis, lag, n).flatten()]
            )
            correlation = torch.corrcoef(pairs)[0, 1]
            assert abs(correlation) < 4 / math.sqrt(pairs.shape[1])
    assert len(noise.unique()) > 0.99 * noise.numel()


def test_noise_is_keyed_by_position_and_token_only():
    """The same position has the same noise in any pass, and a larger vocabulary only adds."""
    randomness = KeyedRandomness([3, 4])
    block = randomness.gumbel(torch.tensor([[5, 6, 7], [1, 2, 3]]), 9)
    later = randomness.gumbel(torch.tensor([[7], [2]]), 12)
    assert torch.equal(block[0, 2], later[0, 0, :9])
    assert torch.equal(block[1, 1], later[1, 0, :9])
    assert not torch.equal(block[0, 1], later[0, 0, :9])


@pytest.mark.parametrize("vocabulary", [_CACHED // 3, _CACHED + 5])
def test_noise_made_in_parts_is_that_of_each_position(vocabulary):
    randomness = KeyedRandomness([3, 4])
    made = randomness.gumbel(torch.tensor([[5, 6, 7, 8], [1, 2, 3, 4]]), vocabulary)
    for row, seed in enumerate([3, 4]):
        for i, position in enumerate([[5, 6, 7, 8], [1, 2, 3, 4]][row]):
            alone = KeyedRandomness([seed]).gumbel(torch.tensor([[position]]), vocabulary)
            assert torch.equal(made[row, i], alone[0, 0])


def without_loops(monkeypatch):
    monkeypatch.setattr(few_queries, "loops", lambda: None)


@pytest.mark.skipif(few_queries.loops() is None, reason="needs numba")
@pytest.mark.parametrize("vocabulary", [1, 7, 100, 2 * loops.PART + 3])
def test_compiled_noise_is_the_formula_s(vocabulary, monkeypatch):
    """Up to the rounding of logarithms, and a token has its number beside any others."""
    seeds, positions = [3, 4], torch.tensor([[5, 6, 2**40], [1, 2, 3]])
    found = KeyedRandomness(seeds).gumbel(positions, vocabulary)
    more = KeyedRandomness(seeds).gumbel(positions, 3 * loops.PART + 1)
    assert torch.equal(found, more[..., :vocabulary])
    without_loops(monkeypatch)
    formula = KeyedRandomness(seeds).gumbel(positions, vocabulary)
    assert (found - formula).abs().max() < 2e-6
    other = KeyedRandomness(seeds).gumbel(positions + 1, vocabulary)  # negative control
    assert (found - other).abs().max() > 1e-3


@pytest.mark.skipif(few_queries.loops() is None, reason="needs numba")
def test_noise_is_exact_at_both_ends():
    """The loop's logarithms are right for the smallest and the largest v, and between them."""
    v = np.float32([2.0**-53, 2.0**-30, 1e-7, 1e-3, 0.25, 0.5, 0.75, 1 - 2**-20, 1 - 2**-24])
    rest = np.float32(1) - v
    found = [-loops.log(np.float32((a - (1 - b)) / b) - loops.log(b)) for a, b in zip(v, rest)]
    exact = -np.log(-np.log1p(-v.astype(np.float64)))
    assert np.abs(np.array(found) - exact).max() < 2e-6


def differs(randomness, calls):
    """Whether noise of a sequence of calls ever differs from noise of a single call."""
    seeds, found = [8, 15, -3], False
    for positions, dropped in calls:
        positions = torch.tensor(positions)[: len(seeds)]
        alone = KeyedRandomness(seeds).gumbel(positions, 5)
        found |= not torch.equal(randomness.gumbel(positions, 5), alone)
        if dropped and len(seeds) > 1:
            kept = torch.arange(1, len(seeds))
            randomness.select(kept)
            seeds = seeds[1:]
    return found


# Three rows of as many positions: any, as far as the noise is concerned.
WINDOWS = st.integers(1, 4).flatmap(
    lambda n: st.lists(st.lists(st.integers(0, 6), min_size=n, max_size=n), min_size=3, max_size=3)
)


@given(st.lists(st.tuples(WINDOWS, st.booleans()), max_size=6))
def test_what_was_asked_before_changes_no_noise(calls):
    assert not differs(KeyedRandomness([8, 15, -3]), calls)


class Misremembers(KeyedRandomness):
    """Wrong: what the last call made is taken for noise of the next positions."""

    def gumbel(self, positions, vocabulary):
        noise = super().gumbel(positions, vocabulary)
        self._last = positions + 1, noise
        return noise


def test_a_wrong_memory_fails_the_same_test():
    window = [[0, 1], [3, 4], [1, 2]]
    later = [[1, 2], [5, 6], [2, 3]]
    assert differs(Misremembers([8, 15, -3]), [(window, False), (later, False)])


def draws(randomness, rows):
    """One round of all three kinds, each [rows, ...]."""
    probs = torch.full((rows, 4, 11), 1 / 11)
    return [
        randomness.categorical(probs),
        randomness.accept(torch.full((rows, 64), 0.5)),
        randomness.gumbel(torch.arange(6).expand(rows, -1), 5),
    ]


def test_a_row_does_not_depend_on_its_neighbours():
    batch = KeyedRandomness([8, 15, -3, 2**70])
    alone = KeyedRandomness([-3])
    first = zip(draws(batch, 4), draws(alone, 1))
    assert all(torch.equal(a[2:3], b) for a, b in first)
    batch.select(torch.tensor([0, 2]))
    second = [(a[1:2], b) for a, b in zip(draws(batch, 2), draws(alone, 1))]
    assert all(torch.equal(a, b) for a, b in second)


def test_every_draw_is_new():
    randomness = KeyedRandomness([1])
    first, second = draws(randomness, 1), draws(randomness, 1)
    assert not torch.equal(first[1], second[1])
    assert torch.equal(first[2], second[2])  # keyed by position, so a further call is equal


def test_huge_and_negative_seeds_work_and_differ():
    rows = draws(KeyedRandomness(HUGE), len(HUGE))[1]
    assert len({tuple(r) for r in rows.tolist()}) == len(HUGE)
    again = draws(KeyedRandomness(HUGE), len(HUGE))[1]
    assert torch.equal(rows, again)


PROBS = torch.tensor([[0, 0.3, 0, 0.2, 0.1, 0.4, 0, 0]])


def test_categorical_has_its_distribution_and_never_draws_probability_zero():
    randomness = KeyedRandomness(list(range(20_000)))
    drawn = randomness.categorical(PROBS.expand(20_000, -1))
    counts = drawn.bincount(minlength=8)
    assert counts[PROBS[0] == 0].sum() == 0
    possible = PROBS[0] > 0
    expected = (PROBS[0, possible] * 20_000).double()
    expected *= 20_000 / expected.sum()
    assert stats.chisquare(counts[possible].numpy(), expected.numpy()).pvalue > 1e-3


@pytest.mark.parametrize("u", [2.0**-53, 1 - 2.0**-53])
@pytest.mark.parametrize("scale", [1.0, 0.7, 1.0000001, 3.0])
def test_categorical_at_the_ends_of_the_unit_interval(monkeypatch, u, scale):
    """Sums that rounding takes off 1 must not open a door to an impossible token."""
    randomness = KeyedRandomness([0])
    monkeypatch.setattr(
        randomness, "_uniform", lambda shape: torch.full(shape, u, dtype=torch.float64)
    )
    drawn = int(randomness.categorical(PROBS * scale))
    assert drawn == (1 if u < 0.5 else 5)


def test_categorical_takes_any_leading_shape():
    probs = torch.eye(5).expand(3, 5, 5)
    assert torch.equal(KeyedRandomness([0, 1, 2]).categorical(probs), torch.arange(5).expand(3, 5))


def test_noise_of_known_positions_is_not_made_again(monkeypatch):
    """A tree asks for the next six positions; where nothing is drafted, the next one is read."""
    right, made = KeyedRandomness._gumbel, []

    def counted(self, positions, vocabulary):
        made.append(positions.shape[1])
        return right(self, positions, vocabulary)

    monkeypatch.setattr(KeyedRandomness, "_gumbel", counted)
    randomness = KeyedRandomness([3, 4])
    for start in range(5):
        at = torch.tensor([[start], [start + 7]])
        six = randomness.gumbel(at + torch.arange(6), 5)
        assert torch.equal(randomness.gumbel(at, 5), six[:, :1])
    assert made == [6, 1, 1, 1, 1]


def test_noise_and_draws_do_not_read_torch_s_default_type():
    """Another thread that loads a model changes it for a moment."""

    def numbers():
        made = KeyedRandomness([1, 2])
        return made.gumbel(torch.arange(3).expand(2, -1), 5), made.normal((2, 3))

    expected, own = numbers(), torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = numbers()
    finally:
        torch.set_default_dtype(own)
    for ours, theirs in zip(found, expected):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)
