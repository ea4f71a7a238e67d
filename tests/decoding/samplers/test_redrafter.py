"""Recurrent drafters decode losslessly, whatever n-grams they are mixed with."""

from math import exp, log

import pytest
import torch

from decoding.drafting.block_drafter import BlockDrafter
from decoding.drafting.ngrams import Ngrams
from decoding.drafting.prompt_lookup import Mixture
from decoding.engine import verify
from decoding.engine.batch import Batch
from decoding.engine.params import KEYED, VERIFY, SamplingParams
from decoding.engine.randomness import KeyedRandomness
from decoding.samplers.redrafter import SURE, MixedLookup, RedrafterSampler
from tests.support import tiny
from tests.support.exact import CASES, always_take_the_target, distance
from tests.support.results import ids
from tests.support.samplers import (
    forgets_last,
    keeps_rejected,
    verifies_marginals,
)
from tests.support.texts import PROMPTS, SEEDS, WARPS, V, plain_texts, target


def redrafter(model, k, cls=RedrafterSampler, **knobs):
    drafter = tiny.redrafter(model)
    return cls(model, tiny.tokenizer(model.config.vocab_size), drafter, block_size=k, **knobs)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("name", CASES)
def test_it_has_the_plain_distribution(name, rule):
    case = dict(CASES[name])
    eos, k = case.pop("eos", None), case.pop("k")
    model = tiny.causal_lm(case.pop("vocabulary"), eos_token_id=eos)
    sampler = redrafter(model, k)
    params = SamplingParams(max_new_tokens=case.pop("new"), verify=rule, **case)
    assert distance(sampler, params, {eos} - {None}) <= 1e-9


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_wrong_rules_fail_the_same_test(monkeypatch, rule):
    params = SamplingParams(max_new_tokens=2, verify=rule)
    model = tiny.causal_lm(3)
    assert distance(redrafter(model, 2), params) <= 1e-9
    assert distance(redrafter(model, 2, verifies_marginals(RedrafterSampler)), params) > 1e-3
    monkeypatch.setattr(verify, rule, always_take_the_target(verify.rejection))
    assert distance(redrafter(model, 2), params) > 1e-3


@pytest.mark.parametrize("warp", WARPS)
@pytest.mark.parametrize("rule", KEYED)
def test_the_text_is_plain_decoding_s(rule, warp):
    """The batch becomes smaller, and each prompt has the text that it has alone."""
    model = target(layers=3)
    for temperature in (0.0, 1.0):
        params = SamplingParams(20, temperature, verify=rule, **WARPS[warp])
        sampler = redrafter(model, 4, nodes=7)
        for _ in range(2):  # without earlier answers, and with
            found = sampler.generate(PROMPTS, params, seeds=SEEDS)
            assert ids(found) == plain_texts(params, layers=3)


def passes(sampler, params):
    return sum(r.stats.target_passes for r in sampler.generate(PROMPTS[:1], params, seeds=[0]))


def test_earlier_answers_are_drafted():
    """Answers that were given before take fewer passes, unless none are kept."""
    params = SamplingParams(24, 0.0, verify="tree")
    model = target(layers=3)
    with_, without = (redrafter(model, 4, nodes=16, kept_tokens=n) for n in (1000, 0))
    first = passes(with_, params)
    assert first == passes(without, params) == passes(without, params)
    assert passes(with_, params) < first
    assert passes(with_.fresh(), params) == first


class Recording(RedrafterSampler):
    """Keeps the logits after committed tokens, in `drafts`, with the prefix that they are after."""

    def own_logits(self, batch, k, *drafted):
        logits = super().own_logits(batch, k, *drafted)
        if not drafted:
            for tokens, n, row in zip(batch.tokens.tolist(), batch.lengths.tolist(), logits):
                self.drafts.append((tokens[:n], row))
        return logits


@torch.no_grad()
def anew(sampler, prefix):
    """The first token's logits after a prefix, without anything kept."""
    batch = Batch([prefix], len(prefix) + 12, KeyedRandomness([0]), "cpu")
    sampler.begin(batch, SamplingParams(1))
    return RedrafterSampler.own_logits(sampler, batch, 4)[0]


def worst(cls, rule, temperature):
    """How far drafts in the course of decoding are from those made anew, at the most."""
    sampler = redrafter(tiny.causal_lm(V, layers=3), 4, cls)
    sampler.drafts = []
    params = SamplingParams(24, temperature, verify=rule)
    sampler.generate(PROMPTS, params, seeds=SEEDS)
    found = 0.0
    assert sampler.drafts
    for prefix, logits in sampler.drafts:
        if len(prefix) > 1:  # a prompt of one token has no state yet
            found = max(found, (logits - anew(sampler, prefix)).abs().max().item())
    return found


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rule", VERIFY)
def test_it_reads_the_accepted_tokens(rule, temperature):
    assert worst(Recording, rule, temperature) < 1e-9


@pytest.mark.parametrize("rule", ["coupled", "tree"])
@pytest.mark.parametrize("wrong", [keeps_rejected, forgets_last])
def test_wrong_states_are_seen(wrong, rule):
    assert worst(wrong(Recording), rule, 1.0) > 1e-3


def ngrams_of(*texts):
    ngrams = Ngrams(100, 1000)
    ngrams.add([*texts])
    return ngrams


def test_the_weight_of_n_grams():
    """It is their largest probability, within bounds; 1 alone, 0 for what was never seen."""
    lookup = MixedLookup([1, 2, 3], ngrams_of(*[[1, 2, 3, 4, 5]] * 50, *[[1, 2, 3, 9, 5]] * 50))
    found, weight = lookup.guesses((1, 2, 3))
    assert weight == pytest.approx(max(found.values()))
    assert found[4] == pytest.approx(found[9]) == pytest.approx(0.5, abs=0.02)
    sure, weight = lookup.guesses((2, 3, 4))
    assert max(sure, key=sure.get) == 5
    assert 0.97 < weight <= 1 / (1 + exp(-SURE))
    assert lookup.guesses((2, 3, 4), alone=True) == (sure, 1.0)
    assert lookup.guesses((50,), alone=True) == lookup.guesses((50,)) == ({}, 0.0)


@pytest.mark.parametrize(("right", "sign"), [(4, 1), (8, -1)])
def test_a_text_teaches_the_weight(right, sign):
    """It grows where the n-grams are right and the drafter is not, and shrinks where they fail."""
    lookup = MixedLookup([7, 1, 2, 3], ngrams_of(*[[1, 2, 3, 4]] * 9, *[[1, 2, 3, 9]] * 9))
    guessed, before = lookup.guesses(lookup.suffix)
    drafted = [right, 50], [log(0.01), log(0.9)] if right == 4 else [log(0.9), log(0.01)]
    lookup.weighed(lookup.suffix, Mixture(drafted, guessed, before))
    lookup.extend([right])
    assert sign * lookup.bias > 0.3
    bias = lookup.bias
    lookup.extend([1, 2, 3])  # nothing was mixed
    assert lookup.bias == bias


def test_the_evidence_of_a_token_is_the_gradient_of_its_log_probability():
    drafted, guessed, odds = ([1, 2], [log(0.6), log(0.1)]), {2: 0.7, 3: 0.2}, 0.3
    q = {1: 0.6, 2: 0.1}

    def log_p(token, odds):
        b = 1 / (1 + exp(-odds))
        return log((1 - b) * q.get(token, 0.0) + b * guessed.get(token, 0.0))

    b = 1 / (1 + exp(-odds))
    for token in (1, 2, 3):
        slope = (log_p(token, odds + 1e-5) - log_p(token, odds - 1e-5)) / 2e-5
        assert Mixture(drafted, guessed, b).evidence(token) == pytest.approx(slope, abs=1e-8)
    assert Mixture(drafted, guessed, b).evidence(9) == -b  # the drafter's, most likely


class Whole(RedrafterSampler):
    """Its tokens' logits are taken from those of all tokens."""

    own_logits = BlockDrafter.own_logits
    asked = 0

    def draft_logits(self, batch, k):
        self.asked += 1
        return self.fitted(RedrafterSampler.own_logits(self, batch, k), [])

    def extend(self, batch, tokens, depth, parent):
        return self.fitted(RedrafterSampler.own_logits(self, batch, 0, tokens, depth, parent), [])


@pytest.mark.parametrize("warp", WARPS)
def test_trees_of_its_own_tokens_are_those_of_all_tokens(warp):
    model = target(layers=3)
    params = SamplingParams(20, 1.0, verify="tree", **WARPS[warp])
    few = tiny.redrafter(model, draft_ids=torch.arange(0, V, 2))
    found = []
    for cls in (RedrafterSampler, Whole):
        sampler = cls(model, tiny.tokenizer(V), few, block_size=4, nodes=7)
        results = sampler.generate(PROMPTS, params, seeds=SEEDS)
        found.append((ids(results), [r.stats.target_passes for r in results]))
    assert sampler.asked
    assert found[0] == found[1]
