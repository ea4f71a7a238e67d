"""Recurrent drafters decode losslessly, whatever n-grams they are mixed with."""

from math import exp, inf, log

import pytest
import torch

from decoding.drafting.block_drafter import BlockDrafter
from decoding.drafting.earlier_answers import seen
from decoding.drafting.ngrams import Ngrams
from decoding.drafting.prompt_lookup import Lookup
from decoding.engine import verify
from decoding.engine.batch import Batch
from decoding.engine.params import KEYED, VERIFY, SamplingParams
from decoding.engine.randomness import KeyedRandomness
from decoding.samplers.redrafter import (
    MOST,
    POWER,
    RATE,
    START,
    UNSEEN,
    MixedLookup,
    RedrafterSampler,
)
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


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_earlier_answers_are_drafted(temperature):
    """Answers that were given before take fewer passes, unless none are kept."""
    params = SamplingParams(24, temperature, verify="tree")
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


def mixed(*texts, prompt=(7, 1, 2, 3)):
    return MixedLookup([*prompt], ngrams_of(*texts))


DRAFTED = {4: log(0.6), 6: log(0.1)}
TEXTS = [[1, 2, 3, 4]] * 6 + [[1, 2, 3, 9]] * 3


def test_the_weights_of_the_sources():
    """They are powers of odds, and those of n-grams make one distribution."""
    lookup = mixed(*TEXTS, prompt=(1, 2, 3, 8, 1, 2, 3))
    suffix = lookup.suffix
    earlier = lookup._ngrams.after(suffix)
    own, share = Lookup.guesses(lookup, suffix)
    assert own == {8: 1.0}
    odds = [m / (1 - m) for m in (0.6, share, max(earlier.values()))]
    parts = [exp(d) * x**POWER for d, x in zip(START, odds)]
    drafter, text, others = (part / sum(parts) for part in parts)
    assert lookup.weights(suffix, DRAFTED) == pytest.approx([drafter, text, others])
    found, weight = lookup.guesses(suffix, DRAFTED)
    assert weight == pytest.approx(text + others)
    assert weight * found[8] == pytest.approx(text)
    assert weight * found[4] == pytest.approx(others * earlier[4])


def test_without_the_drafter_a_text_has_its_own_weight():
    lookup = mixed(*TEXTS, prompt=(1, 2, 3, 8, 1, 2, 3))
    own, share = Lookup.guesses(lookup, lookup.suffix)
    seen_before = seen(own, share, lookup._ngrams.after(lookup.suffix))
    assert lookup.guesses(lookup.suffix) == (seen_before, 1.0)


def test_what_was_never_seen_has_no_weight():
    lookup = mixed(*TEXTS)
    assert lookup.guesses((50,), DRAFTED) == ({}, 0.0)
    assert lookup.guesses((50,))[0] == {}
    assert lookup.weights((50,), DRAFTED) == [1.0, 0.0, 0.0]


def log_p(lookup, token):
    """log p(token) of the mixture after a text, with UNSEEN for what the drafter does not have."""
    guessed, weight = lookup.guesses(lookup.suffix, DRAFTED)
    q = exp(DRAFTED.get(token, log(UNSEEN)))
    return log((1 - weight) * q + weight * guessed.get(token, 0.0))


@pytest.mark.parametrize("token", [4, 6, 8, 9, 50])
def test_a_text_teaches_by_the_gradient(token):
    """A step along the gradient of log p(token), which both sides of it agree on."""

    def moved(i, by):
        lookup = mixed(*TEXTS, prompt=(1, 2, 3, 8, 1, 2, 3))
        lookup.biases[i] += by
        return log_p(lookup, token)

    lookup = mixed(*TEXTS, prompt=(1, 2, 3, 8, 1, 2, 3))
    lookup.guesses(lookup.suffix, DRAFTED)
    lookup.extend([token])
    for i, (before, after) in enumerate(zip(START, lookup.biases)):
        slope = (moved(i, 1e-5) - moved(i, -1e-5)) / 2e-5
        assert after - before == pytest.approx(RATE * slope, abs=1e-8)
    taught = [*lookup.biases]
    lookup.extend([1, 2, 3])  # nothing was drafted
    assert lookup.biases == taught


@pytest.mark.parametrize(("right", "source"), [(6, 0), (8, 1), (9, 2)])
def test_who_is_right_gains_weight(right, source):
    """In the course of a text, up to a bound."""
    lookup = mixed(*TEXTS, prompt=(1, 2, 3, 8, 1, 2, 3))
    for _ in range(200):
        lookup._drafted[lookup.suffix] = DRAFTED
        lookup._learn(lookup.suffix, right)
    assert lookup.biases[source] == max(lookup.biases) > START[source] + 1
    assert max(map(abs, lookup.biases)) <= MOST


def test_a_token_that_the_drafter_excludes():
    """With top_k=1 all other tokens that it drafts have probability 0."""
    lookup = mixed()
    lookup.guesses(lookup.suffix, {4: 0.0, 6: -inf})
    lookup.extend([6])
    assert lookup.biases == [*START]


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
