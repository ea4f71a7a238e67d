"""Dependent drafts: lossless under every rule, drawn and ranked from the conditionals by hand."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decoding.calibration.tree_ranking import observed
from decoding.drafting import markov, ranked_tree, tree
from decoding.drafting.markov import MarkovScores
from decoding.engine.batch import Batch
from decoding.engine.params import KEYED, VERIFY, SamplingParams
from decoding.engine.randomness import KeyedRandomness
from decoding.engine.warp import warp
from decoding.samplers.deer import DeerSampler
from tests.support import texts, tiny
from tests.support.exact import CASES, deer, distance
from tests.support.lossless import one_too_many
from tests.support.results import ids
from tests.support.samplers import dflash, head_of
from tests.support.texts import PROMPTS, SEEDS, WARPS, V, plain_texts
from tests.support.trees import assert_likeliest, numbers


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("name", CASES)
def test_it_has_the_plain_distribution(name, rule):
    case = dict(CASES[name])
    eos, vocabulary = case.pop("eos", None), case.pop("vocabulary")
    sampler = deer(vocabulary, case.pop("k"), eos, markov=head_of(vocabulary + 2))
    params = SamplingParams(max_new_tokens=case.pop("new"), verify=rule, **case)
    assert distance(sampler, params, {eos} - {None}) <= 1e-9


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_other_drafters_have_the_plain_distribution(rule):
    """PARD's layout, DFlash, padding of either side, and a vocabulary of two of three tokens."""
    params = SamplingParams(max_new_tokens=3, verify=rule)
    ids = torch.tensor([2, 0])
    for sampler in (
        deer(3, 2, attention="causal", markov=head_of(3)),
        dflash(tiny.causal_lm(3), 2, markov=head_of(3)),
        deer(3, 2, drafter_vocabulary=7, markov=head_of(7)),
        deer(3, 2, draft_ids=ids, markov=head_of(2, tokens=3)),
    ):
        assert distance(sampler, params) <= 1e-9


class VerifiesMarginals(DeerSampler):
    """Wrong: the draft is verified with the marginals, from which it was not drawn."""

    def draft_chain(self, batch, k, noise, params):
        draft, _ = super().draft_chain(batch, k, noise, params)
        return draft, self.draft_pass(batch, k, params).softmax(-1)


class VerifiesAnotherParent(DeerSampler):
    """Wrong: q is conditioned on the drafted token itself instead of the one before it."""

    def draft_chain(self, batch, k, noise, params):
        draft, _ = super().draft_chain(batch, k, noise, params)
        q = self.forced_pass(batch, draft.roll(-1, 1), params).softmax(-1)
        return draft, q


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [VerifiesMarginals, VerifiesAnotherParent])
@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_a_wrong_q_fails_the_same_test(rule, wrong):
    sampler = deer(3, 2, markov=head_of(5))
    params = SamplingParams(max_new_tokens=3, verify=rule)
    assert distance(sampler, params) <= 1e-9
    sampler.__class__ = wrong
    assert distance(sampler, params) > 1e-3


def begun(sampler, params, prompts=PROMPTS):
    capacity = max(map(len, prompts)) + 8 + sampler.margin(params)
    batch = Batch(prompts, capacity, KeyedRandomness(SEEDS), "cpu")
    sampler.begin(batch, params)
    return batch


DRAFT_IDS = torch.tensor([9, 0, 3, 5, 2])


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@torch.inference_mode()
def test_q_is_the_conditional_by_hand(temperature):
    """log softmax((l_i + U[x_i-1] V^T) / T), with rows of V by position in the vocabulary."""
    head, k = head_of(5, tokens=V), 4
    sampler = texts.deer(
        texts.target(), texts.random_drafter(), k, draft_ids=DRAFT_IDS, markov=head
    )
    params = SamplingParams(8, temperature, verify="rejection", top_k=3)
    draft, q = sampler.draft_chain(begun(sampler, params), k, None, params)
    logits = sampler.draft_logits(begun(sampler, params), k)
    U, W, last = head.markov_w1.weight, head.markov_w2.weight, [p[-1] for p in PROMPTS]

    def by_hand(x, last=last):
        expected = logits.clone().double()
        for b in range(len(x)):
            for i, token in enumerate([last[b], *x[b]][:k]):
                expected[b, i, DRAFT_IDS] += U[token] @ W.T
        return warp(expected, params).softmax(-1)

    torch.testing.assert_close(q.double(), by_hand(draft.tolist()), rtol=0, atol=1e-6)
    forced = sampler.forced_pass(begun(sampler, params), draft, params).softmax(-1)
    torch.testing.assert_close(forced, q, rtol=0, atol=1e-6)
    # Negative controls: the token itself as its own parent, and another last committed token.
    assert (q - by_hand(draft.roll(-1, 1).tolist())).abs().max() > 1e-2
    assert (q - by_hand(draft.tolist(), last[1:] + last[:1])).abs().max() > 1e-2


@torch.inference_mode()
def test_a_coupled_draft_is_the_choice_under_the_conditional():
    sampler = texts.deer(texts.target(), texts.random_drafter(), 4, markov=head_of(V + 2))
    params = SamplingParams(8, 1.0, verify="coupled")
    batch = begun(sampler, params)
    noise = sampler.noise(batch, 5, params)
    draft, q = sampler.draft_chain(batch, 4, noise, params)
    assert q is None
    logits = sampler.forced_pass(begun(sampler, params), draft, params)
    assert torch.equal((logits + noise[:, :4]).argmax(-1), draft)
    alone = sampler.draft_pass(begun(sampler, params), 4, params)
    assert not torch.equal((alone + noise[:, :4]).argmax(-1), draft)


@pytest.mark.slow
@pytest.mark.parametrize("rule", KEYED)
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("name", ["no warp", "all"])
def test_the_text_is_plain_decoding_s(name, temperature, rule):
    model = texts.target()
    params = SamplingParams(18, temperature, verify=rule, **WARPS[name])
    expected = plain_texts(params)
    emitted = []
    for head in (None, head_of(V + 2)):
        for drafter, k in ((texts.random_drafter(), 3), (texts.drafter_of_target(model), 6)):
            found = texts.deer(model, drafter, k, markov=head).generate(
                PROMPTS, params, seeds=SEEDS
            )
            assert ids(found) == expected
            emitted.append([r.stats.emitted for r in found])
    assert emitted[:2] != emitted[2:]  # the head does change what is drafted


@pytest.mark.parametrize("rule", KEYED)
def test_a_wrong_sampler_has_another_text(rule):
    model, params = texts.target(), SamplingParams(18, 1.0, verify=rule)
    expected = plain_texts(params)
    wrong = one_too_many(DeerSampler)
    broken = texts.deer(model, texts.random_drafter(), 3, wrong, markov=head_of(V + 2))
    assert ids(broken.generate(PROMPTS, params, seeds=SEEDS)) != expected


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rule", VERIFY)
def test_a_batch_is_row_for_row_a_batch_of_one(rule, temperature):
    model = texts.target(eos_token_id=4)
    params = SamplingParams(max_new_tokens=16, temperature=temperature, verify=rule)
    sampler = texts.deer(model, texts.drafter_of_target(model), 3, markov=head_of(V + 2))
    together = sampler.generate(PROMPTS, params, seeds=SEEDS)
    alone = [sampler.generate([p], params, seeds=[s])[0] for p, s in zip(PROMPTS, SEEDS)]
    assert ids(together) == ids(alone)
    assert [r.stats.emitted for r in together] == [r.stats.emitted for r in alone]
    joined = sampler.generate(PROMPTS, params, seeds=SEEDS, at_once=2)
    assert ids(joined) == ids(alone)


def pairs_of(table):
    """The terms of a table [n, n]: what row u adds to the logits of the token after u."""
    return tree.Pairs(table, torch.eye(len(table)))


square = st.lists(numbers, min_size=3, max_size=3)


@settings(max_examples=40, deadline=None)
@given(st.lists(numbers, min_size=2, max_size=3), square, square, st.booleans(),
       st.integers(1, 14))  # fmt: skip
def test_the_nodes_are_the_likeliest_prefixes_under_the_conditionals(
    logits, terms, scores, counted, nodes
):
    """With the noise in the logits, a sharpness for each depth, and bigram scores or none."""
    z, term, score = (torch.tensor(x).double() for x in (logits, terms, scores))
    s, bigrams = torch.tensor([1.5, 0.5, 2.0]).double(), None
    if counted:
        after = [dict(enumerate(row)) for row in scores]
        bigrams = tree.BigramScores(after.__getitem__, [1.0] * 3)

    found = tree.draft_trees(z[None], nodes, s, bigrams, pairs=pairs_of(term)).rows[0]

    def chance(prefix):
        p = (s[0] * z[0]).softmax(-1)[prefix[0]]
        for i, (u, v) in enumerate(pairwise(prefix), 1):
            p = p * (s[i] * (z[i] + term[u]) + counted * score[u]).softmax(-1)[v]
        return p.item()

    assert_likeliest(found, chance, min(len(z), nodes), nodes)


def test_a_tree_by_another_parent_is_another_tree():
    """Negative control: the terms of the token itself instead of those of its parent."""
    draw = torch.Generator().manual_seed(0)
    z, term = torch.randn(1, 3, 3, generator=draw), 3 * torch.randn(3, 3, generator=draw)
    found = []
    for table in (term, term.T):
        found.append(tree.draft_trees(z, 9, pairs=pairs_of(table)).rows[0])
    assert found[0] != found[1]


def paths_of(z, term, s, count):
    """The probabilities of all paths of z [k, n], and the tokens and conditionals that are kept."""
    q = [(s[0] * z[0]).softmax(-1)]
    q += [(s[i] * (z[i] + term)).softmax(-1) for i in range(1, len(z))]  # [before, token]
    joint = q[0]
    for after in q[1:]:
        joint = joint[..., None] * after
    kept = tree.likeliest_paths((s[:, None] * z)[None], count, pairs_of(term), s[:, None])
    return joint, q, *(x[0] for x in kept)


@pytest.mark.parametrize("nodes", [3, 6])
def test_with_as_many_tokens_as_nodes_no_node_is_missing(nodes):
    """All tokens of the most probable prefixes are kept, and others than depths alone would."""
    draw, differ = torch.Generator().manual_seed(0), 0
    s = torch.tensor([1.5, 0.5, 2.0]).double()
    for _ in range(20):
        z = 2 * torch.randn(3, 9, generator=draw).double()
        term = 3 * torch.randn(9, 9, generator=draw).double()
        joint, q, tokens, conditionals = paths_of(z, term, s, nodes)
        prefixes = [joint.sum((1, 2)), joint.sum(2).flatten(), joint.flatten()]
        least = torch.cat(prefixes).topk(nodes).values[-1]
        for depth, p in enumerate(prefixes):
            ends = {i % 9 for i in (p >= least).nonzero().flatten().tolist()}
            assert ends <= set(tokens[depth].tolist())
            differ += not ends <= set(z[depth].topk(nodes).indices.tolist())  # negative control
            if depth:
                expected = q[depth][tokens[depth - 1]][:, tokens[depth]].log()
                torch.testing.assert_close(conditionals[depth - 1], expected)
    assert differ >= 5


def test_pairs_are_what_following_says():
    head = head_of(5, tokens=V)
    scores = MarkovScores(head, V, DRAFT_IDS, torch.device("cpu"))
    tokens = torch.tensor([[9, 3], [5, 0]])
    before, after, scale = scores.pairs(0.5)
    rows = torch.tensor([[DRAFT_IDS.tolist().index(u) for u in row] for row in tokens.tolist()])
    following = scores.following(tokens)
    torch.testing.assert_close(before[rows] @ after.T, following[..., DRAFT_IDS])
    assert (scale, scores.pairs(0.0).scale) == (2, 1)
    others = [v for v in range(V) if v not in DRAFT_IDS]
    assert (following[..., others] == 0).all()
    after_another = scores.following(torch.tensor(7))[DRAFT_IDS]  # which is not drafted itself
    torch.testing.assert_close(after_another, head.markov_w1.weight[7] @ after.T)
    with pytest.raises(ValueError, match="head is of 5 tokens and the drafter of 4"):
        MarkovScores(head, V, DRAFT_IDS[:4], torch.device("cpu"))
    with pytest.raises(ValueError, match="more than padding"):
        MarkovScores(head, 5000, None, torch.device("cpu"))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_calibration_sees_the_conditionals(temperature):
    """What follows a known token is observed as a cycle that has drafted it would rank it."""
    model, head = texts.target(), head_of(V + 2)
    params = SamplingParams(20, temperature, verify="tree", seed=3, ignore_eos=True)
    plain = observed(texts.deer(model, texts.random_drafter(), 3), PROMPTS, params)
    z, choice = observed(texts.deer(model, texts.random_drafter(), 3, markov=head), PROMPTS, params)
    assert torch.equal(choice, plain[1])
    added = MarkovScores(head, V, None, torch.device("cpu")).following(choice[:, :-1])
    found = z[:, 1:] - plain[0][:, 1:]  # T is 0 or 1, so nothing is divided
    found, expected = (x.double() - x[..., :1] for x in (found, added))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def test_a_file_keeps_it_and_a_wrong_one_is_one_line(tmp_path):
    head, file = head_of(5), tmp_path / markov.FILE
    file.write_bytes(markov.stored(head))
    found = markov.read(file)
    assert found.state_dict().keys() == head.state_dict().keys()
    assert all(torch.equal(x, head.state_dict()[k]) for k, x in found.state_dict().items())
    broken = head_of(5)
    broken.markov_w2.weight.data[0, 0] = torch.nan
    narrow = head_of(5)
    narrow.markov_w2.weight.data = narrow.markov_w2.weight.data[:, :1]
    for content in (b"no tensors", markov.stored(broken), markov.stored(narrow), None):
        file.unlink() if content is None else file.write_bytes(content)
        with pytest.raises(ValueError, match=r"markov_head\.tensors .*markov_head=false") as error:
            markov.read(file)
        assert "\n" not in str(error.value)


def test_filters_wait_for_the_token_before(monkeypatch):
    """With a head a tree may hold tokens that top_k would leave out of the logits without it."""
    kept = []

    def recorded(logits, *rest):
        kept.append(int(logits.isfinite().sum(-1).max()))
        return tree.draft_trees(logits, *rest)

    monkeypatch.setattr(ranked_tree, "draft_trees", recorded)
    params, found = SamplingParams(6, 1.0, verify="tree", top_k=2), []
    for head in (None, head_of(V + 2)):
        sampler = texts.deer(texts.target(), texts.random_drafter(), 3, markov=head)
        found.append(sampler.generate(PROMPTS, params, seeds=SEEDS))
        assert (max(kept) > 2) is (head is not None)
        kept.clear()
    assert ids(found[0]) == ids(found[1])
