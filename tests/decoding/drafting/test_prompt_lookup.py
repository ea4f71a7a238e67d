"""Prompt lookup: guesses by hand, in the ranking of a tree, and in real decodes."""

import math
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decoding.drafting import tree
from decoding.drafting.prompt_lookup import TRUST, USUAL, Lookup, append
from decoding.engine.params import SamplingParams
from tests.support.results import ids
from tests.support.texts import (
    PROMPTS,
    SEEDS,
    deer,
    drafter_of_target,
    plain_rows,
    random_drafter,
    target,
)
from tests.support.trees import assert_likeliest, numbers


def weight(n, right, guesses):
    return (right + TRUST * USUAL[n]) / (guesses + TRUST)


def test_guesses_by_hand():
    text = Lookup([1, 2, 3, 1, 2])
    assert text.suffix == (1, 2, 3, 1, 2)
    # (1, 2) was followed by 3 once; no token has come after two that came before.
    assert text.guesses(text.suffix) == ({3: 1.0}, weight(2, 0, 0))
    assert text.guesses((2, 1)) == ({2: 1.0}, weight(1, 1, 1))  # 2 came after 1 again
    assert text.guesses((9,)) == ({}, 0.0)
    text.extend([3])
    assert text.guesses((9, 3, 1))[0] == {2: 1.0}
    assert text.guesses((7, 1, 2)) == ({3: 1.0}, weight(2, 1, 1))
    text.extend([4])  # 1 had followed (1, 2, 3)
    assert text.guesses((1, 2, 3)) == ({1: 1 / 2, 4: 1 / 2}, weight(3, 0, 1))
    assert append((), 5) == (5,)
    assert append((1, 2, 3, 4, 5, 6), 7) == (2, 3, 4, 5, 6, 7)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 2), max_size=30))
def test_a_text_in_parts_gives_the_same_guesses(tokens):
    whole, parts = Lookup(tokens), Lookup([])
    for token in tokens:
        parts.extend([token])
    for suffix in product(range(3), repeat=4):
        guesses, share = whole.guesses(suffix)
        assert parts.guesses(suffix) == (guesses, share)
        assert 0 <= share < 1
        # They are the tokens after the last occurrences of the longest suffix that occurred.
        for n in range(4, 0, -1):
            starts = range(len(tokens) - n)
            found = [tokens[i + n] for i in starts if tuple(tokens[i : i + n]) == suffix[-n:]]
            if found:
                break
        assert guesses == pytest.approx({v: found.count(v) / len(found) for v in found})


@settings(max_examples=40, deadline=None)
@given(
    st.lists(numbers, min_size=1, max_size=3),
    st.lists(st.integers(0, 2), min_size=4, max_size=20),
    st.integers(1, 6),
)
def test_the_nodes_are_the_likeliest_prefixes_of_the_mixture(logits, text, nodes):
    z, lookup = torch.tensor(logits).double(), Lookup(text)
    found = tree.draft_trees(z[None], nodes, lookups=[lookup]).rows[0]

    def chance(prefix):
        p, suffix, marginals = 1.0, lookup.suffix, z.softmax(-1)
        for i, v in enumerate(prefix):
            guesses, share = lookup.guesses(suffix)
            drafted = (1 - share) * marginals[i, v].item() if i < len(z) else 0.0
            p, suffix = p * (drafted + share * guesses.get(v, 0.0)), append(suffix, v)
        return p

    assert_likeliest(found, chance, nodes, len(found.token))


def test_rows_with_fewer_prefixes_make_all_trees_smaller():
    """One draft of three tokens each; only the second text has a guess for what follows it."""
    lookups = [Lookup([]), Lookup([0, 1, 2] * 4)]
    trees = tree.draft_trees(torch.zeros(2, 1, 3), 5, lookups=lookups)
    assert [len(row.token) for row in trees.rows] == [3, 3]
    assert trees.token.shape == (2, 3)
    alone = tree.draft_trees(torch.zeros(1, 1, 3), 5, lookups=lookups[1:])
    assert alone.rows[0].token[:3] == trees.rows[1].token
    assert max(alone.rows[0].depth) > 1
    assert all(node < 3 for node in trees.rows[1].child.values())


def test_guesses_that_the_drafter_does_not_have():
    """They become candidates with their own weight, and the others share the rest."""
    lookup = Lookup([7, 9] * 4 + [7])
    depths = [([1, 2], [math.log(0.6), math.log(0.3)])]
    children = tree.child_ranking(depths, lookup=lookup)
    guesses, share = lookup.guesses(lookup.suffix)
    tokens, scores = children(())
    assert guesses == {9: 1.0}
    assert tokens == [9, 1, 2]
    rest = 1 - share
    assert [math.exp(x) for x in scores] == pytest.approx([share, 0.6 * rest, 0.3 * rest])
    # Where the draft has ended there is nothing else.
    guesses, share = lookup.guesses((7, 9, 7, 9, 7, 9))
    assert children((9,)) == ([*guesses], [math.log(share)]) == ([7], [math.log(share)])
    assert children((3,)) == ([], [])


def passes(temperature, lookup, drafter):
    model = target()
    params = SamplingParams(60, temperature, verify="tree", ignore_eos=True)
    sampler = deer(model, drafter, 4, nodes=6, lookup=lookup)
    found = sampler.generate(PROMPTS, params, seeds=SEEDS)
    assert ids(found) == ids(plain_rows(model, params))
    return sum(r.stats.target_passes for r in found)


def test_a_text_that_repeats_itself_needs_fewer_passes():
    """A tiny greedy model does; its text is plain decoding's with and without lookups."""
    drafter = random_drafter()
    assert passes(0.0, True, drafter) < 0.95 * passes(0.0, False, drafter)


def test_lookups_are_not_used_where_tokens_are_drawn():
    drafter = drafter_of_target(target())
    assert passes(1.0, True, drafter) == passes(1.0, False, drafter)
