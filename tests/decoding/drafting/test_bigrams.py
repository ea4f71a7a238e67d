"""Bigram scores: counts by hand, the trees that they rank, and outputs that they do not change."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decoding.calibration.tree_ranking import fit
from decoding.drafting import bigrams, tree
from decoding.engine.params import SamplingParams
from tests.support.results import ids
from tests.support.texts import PROMPTS, SEEDS, V, deer, drafter_of_target, target
from tests.support.texts import plain_rows as plain
from tests.support.trees import assert_likeliest, numbers

TEXTS = [[0, 1, 0, 1, 2], [2, 2], [3]]


def test_counts_by_hand():
    """Pairs 01 twice, 10, 12 and 22 once; of what comes second, two fifths are 1."""
    found = bigrams.count(TEXTS, 4, beta=2.0)
    assert found.pairs.tolist() == [1, 4, 6, 10]
    ones = [math.log1p(1 / (2 * p)) for p in (0.2, 0.4, 0.4)]
    scores = [math.log1p(2 / (2 * 0.4)), *ones]
    assert found.scores.tolist() == pytest.approx(scores)
    assert found.after(0) == {1: pytest.approx(scores[0])}
    assert found.after(3) == {}
    rows = found.rows(torch.tensor([1, 3, 0]))
    assert rows[0].tolist() == pytest.approx([scores[1], 0, scores[2], 0])
    assert rows[1:].tolist() == [[0] * 4, pytest.approx([0, scores[0], 0, 0])]


def test_score_is_what_a_smoothed_bigram_model_adds():
    """softmax(log p + score) is (c(u, v) + beta p(v)) / (c(u) + beta)."""
    draw = torch.Generator().manual_seed(0)
    text, beta = torch.randint(7, (300,), generator=draw).tolist(), 3.0
    found = bigrams.count([text], 7, beta)
    pairs = torch.zeros(7, 7)
    for u, v in pairwise(text):
        pairs[u, v] += 1
    p = pairs.sum(0) / pairs.sum()
    expected = (pairs + beta * p) / (pairs.sum(1, keepdim=True) + beta)
    assert torch.allclose((p.log() + found.rows(torch.arange(7))).softmax(-1), expected)


def test_batches_add_up_and_the_most_frequent_stay(monkeypatch):
    whole = bigrams.count(TEXTS * 5, 4)
    monkeypatch.setattr(bigrams._batches, "__defaults__", (3,))
    parts = bigrams.count(TEXTS * 5, 4)
    assert torch.equal(whole.pairs, parts.pairs)
    assert torch.equal(whole.scores, parts.scores)
    assert bigrams.count(TEXTS, 4, most=1).pairs.tolist() == [1]


def test_a_file_keeps_them_and_a_damaged_one_is_one_line(tmp_path):
    found = bigrams.count(TEXTS, 4)
    bigrams.write(found, tmp_path)
    read = bigrams.read(tmp_path / bigrams.FILE)
    assert torch.equal(read.pairs, found.pairs)
    assert torch.equal(read.scores, found.scores)
    assert read.vocabulary == 4
    assert [f.name for f in tmp_path.iterdir()] == [bigrams.FILE]
    bigrams.write(found._replace(scores=found.scores * torch.nan), tmp_path)
    with pytest.raises(ValueError, match="not finite"):
        bigrams.read(tmp_path / bigrams.FILE)
    (tmp_path / bigrams.FILE).write_bytes(b"no tensors")
    with pytest.raises(ValueError, match=r"bigrams\.tensors .*python -m decoding\.calibrate"):
        bigrams.read(tmp_path / bigrams.FILE)
    with pytest.raises(ValueError, match="two tokens"):
        bigrams.count([[1], []], 4)


@settings(max_examples=40, deadline=None)
@given(st.lists(numbers, min_size=2, max_size=3), st.lists(numbers, min_size=3, max_size=3),
       st.integers(1, 14))  # fmt: skip
def test_the_nodes_are_the_likeliest_prefixes_under_bigram_scores(logits, scores, nodes):
    z, score = torch.tensor(logits).double(), torch.tensor(scores).double()
    after = [dict(enumerate(row)) for row in scores]
    table = tree.BigramScores(after.__getitem__, [1.0] * 3)
    found = tree.draft_trees(z[None], nodes, 1.0, table).rows[0]

    def chance(prefix):
        p = z[0].softmax(-1)[prefix[0]]
        for i, (u, v) in enumerate(pairwise(prefix), 1):
            p = p * (z[i] + score[u]).softmax(-1)[v]
        return p.item()

    assert_likeliest(found, chance, min(len(z), nodes), nodes)


def test_of_many_tokens_the_rest_keeps_its_share():
    """Tokens that are not candidates get no score, but keep their probability in the sum."""
    z = torch.tensor([[3.0, 2, 1, 0], [2.0, 1, 0.5, 0]])
    tokens, p = (x.tolist() for x in reversed(z.log_softmax(-1).topk(2)))
    after = {0: {1: 0.5, 3: 9.0}, 1: {}}
    table = tree.BigramScores(after.__getitem__, [0.0, 3.0])
    children = tree.child_ranking([*zip(tokens, p)], table)
    ranked, scores = children((0,))
    expected = (z[1] + torch.tensor([0, 1.5, 0, 0])).softmax(-1)
    assert ranked == [1, 0]
    assert [math.exp(x) for x in scores] == pytest.approx(expected[[1, 0]].tolist())
    assert children(()) == (tokens[0], p[0])
    assert children((1,)) == (tokens[1], p[1])
    assert children((1, 0)) == ([], [])


def with_bigrams(model, drafter, weight, nodes=6):
    """DEER with a bigram table counted in the target's own answers."""
    texts = [r.token_ids for r in plain(model, SamplingParams(60, 1.0), PROMPTS, [8, 9, 10, 11, 1])]
    table = bigrams.count(texts, V, beta=1.0)
    weights = {"1": [0.0, weight, weight]}
    return deer(
        model, drafter, 4, nodes=nodes, sharpness=1.0, bigrams=table, bigram_weights=weights
    )


@pytest.mark.slow
@pytest.mark.parametrize("weight", [0.7, 20.0])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_the_output_is_plain_decodings_whatever_the_bigram_scores(temperature, weight):
    model = target()
    params = SamplingParams(30, temperature, verify="tree")
    expected = ids(plain(model, SamplingParams(30, temperature)))
    sampler = with_bigrams(model, drafter_of_target(model), weight)
    assert ids(sampler.generate(PROMPTS, params, seeds=SEEDS)) == expected


def test_bigram_weights_change_the_trees():
    """Negative control of the test above: other weights give other trees."""
    model = target()
    params = SamplingParams(30, 1.0, verify="tree")
    emitted = [
        [r.stats.emitted for r in with_bigrams(model, drafter_of_target(model), w).generate(
            PROMPTS, params, seeds=SEEDS)]
        for w in (0.0, 20.0)
    ]  # fmt: skip
    assert emitted[0] != emitted[1]
    without = deer(model, drafter_of_target(model), 4, nodes=6, sharpness=1.0)
    assert [r.stats.emitted for r in without.generate(PROMPTS, params, seeds=SEEDS)] == emitted[0]


def test_a_fit_finds_both_numbers():
    """Choices drawn from softmax(s z + w score) of the choice before."""
    draw, n, V = torch.Generator().manual_seed(0), 4000, 6
    table = bigrams.count([torch.randint(V, (60,), generator=draw).tolist()], V, beta=0.5)
    z = torch.randn(n, 2, V, generator=draw, dtype=torch.float64)
    first = torch.multinomial((2 * z[:, 0]).softmax(-1), 1, generator=draw)[:, 0]
    p = (1.5 * z[:, 1] + 0.8 * table.rows(first)).softmax(-1)
    choice = torch.stack([first, torch.multinomial(p, 1, generator=draw)[:, 0]], 1)
    sharpness, weights = fit(z, choice, table)
    assert sharpness == pytest.approx([2.0, 1.5], abs=0.1)
    assert weights == [0.0, pytest.approx(0.8, abs=0.1)]
    assert fit(z, choice)[1] == [0.0, 0.0]
