"""Drafts where the target's noise is known: probabilities by enumeration, and grown trees."""

from math import exp, log, prod

import pytest
import torch

from decoding.drafting import tree
from decoding.drafting.next_noise import NextNoise
from decoding.drafting.prompt_lookup import Lookup, append
from decoding.engine.randomness import KeyedRandomness

V, K = 7, 3
Q = torch.randn(K, V, generator=torch.Generator().manual_seed(2)).double().softmax(-1)
GUESSES, WEIGHT = {2: 0.5, 4: 0.3}, 0.6  # the rest of their probability is nobody's


def noise_of(seed, positions=K + 1):
    return KeyedRandomness([seed]).gumbel(torch.arange(positions)[None], V)[0].double()


def chosen(p, g):
    """Return how probable each token is as the target's choice: p e^g, normalised."""
    drawn = p * g.exp()
    return drawn / drawn.sum()


@pytest.mark.parametrize("seed", range(5))
def test_the_mixture_is_that_of_all_tokens(seed):
    """The guesses' part and the drafter's, which has what the guesses leave."""
    g = noise_of(seed)[0]
    left = 1 - WEIGHT * sum(GUESSES.values())
    p = left * Q[0]
    for v, r in GUESSES.items():
        p[v] += WEIGHT * r
    total = (Q[0] * g.exp()).sum().log().item()
    found, weight = NextNoise(noise_of(seed)).weighed(0, GUESSES, WEIGHT, total)
    ours = (1 - weight) * chosen(Q[0], g)
    for v, r in found.items():
        ours[v] += weight * r
    torch.testing.assert_close(ours, chosen(p, g), rtol=0, atol=1e-12)
    assert (p - ours).abs().max() > 0.01  # Negative control: without the noise.


def test_where_nobody_else_speaks_the_rest_are_all_tokens():
    g = noise_of(0)[1]
    found, weight = NextNoise(noise_of(0)).weighed(1, GUESSES, 1.0, None)
    chances = {v: r * g[v].exp().item() for v, r in GUESSES.items()}
    rest = (1 - sum(GUESSES.values())) * g.exp().mean().item()
    assert weight == pytest.approx(sum(chances.values()) / (sum(chances.values()) + rest))
    assert found == pytest.approx({v: x / sum(chances.values()) for v, x in chances.items()})


def test_a_sure_guess_leaves_a_logarithm():
    _, weight = NextNoise(noise_of(0)).weighed(0, {3: 1.0}, 1.0, None)
    assert log(1 - weight) > -25


def probability(lookup, path, g):
    """p' of a path: each token's in the mixture of a drafter and the text, as the target draws."""
    found, suffix = [], lookup.suffix
    for depth, token in enumerate(path):
        guesses, weight = lookup.guesses(suffix)
        p = Q[depth] * (1 - weight * sum(guesses.values()))
        for v, r in guesses.items():
            p[v] += weight * r
        found.append(chosen(p, g[depth])[token].item())
        suffix = append(suffix, token)
    return prod(found)


@pytest.mark.parametrize("seed", range(3))
def test_a_grown_tree_ranks_by_it(seed):
    """Whether the drafter's tokens are all of the vocabulary's or named by ids."""
    lookup, g = Lookup([1, 2, 3, 1, 2, 3, 1, 2]), noise_of(seed)

    def expand(depth, tokens, parents):
        return Q[depth].log()[None, None].expand(1, 1 if tokens is None else tokens.shape[1], -1)

    for ids in (None, torch.arange(V)):
        given = {"lookups": [lookup], "ids": ids, "noise": g[None]}
        found = tree.grow_trees(expand, K, 12, **given).rows[0]
        paths = []
        for (parent, token), score in zip(found.child, found.score):
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
            assert exp(score) == pytest.approx(probability(lookup, paths[-1], g))
        assert len(paths) == 12
        assert max(map(len, paths)) <= K  # there is no noise for more
    without = tree.grow_trees(expand, K, 12, lookups=[lookup]).rows[0]
    assert without.token != found.token  # Negative control.


@pytest.mark.parametrize("excluded", [None, 0])
def test_a_drafters_sum_over_its_tokens(excluded):
    """Also where warping excludes tokens, which have no logarithm."""
    logits, g = Q[:2].log()[None], noise_of(4)[None, :1]
    if excluded is not None:
        logits = logits.clone()
        logits[..., excluded] = -torch.inf
    q = logits[0].softmax(-1)
    (found,) = tree.likeliest(logits, g, None, 3)
    for of, p in zip(found, q):
        tokens, scores = of.ranked
        assert exp(of.total) == pytest.approx((p * g[0, 0].exp()).sum().item())
        assert {v: exp(x) for v, x in of.own.items()} == pytest.approx(
            {v: p[v].item() for v in tokens}
        )
        assert [exp(x) for x in scores] == pytest.approx(chosen(p, g[0, 0])[tokens].tolist())
