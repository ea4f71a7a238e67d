"""EAGLE-3 decodes losslessly, chains and trees, and reads the accepted tokens' states alone."""

import pytest
import torch

from decoding.engine import verify
from decoding.engine.batch import Batch
from decoding.engine.params import KEYED, VERIFY, SamplingParams
from decoding.engine.randomness import KeyedRandomness
from decoding.samplers.eagle3 import Eagle3Sampler
from tests.support import tiny
from tests.support.exact import CASES, always_take_the_target, distance
from tests.support.results import ids
from tests.support.samplers import (
    forgets_last,
    keeps_rejected,
    recording,
    verifies_marginals,
)
from tests.support.texts import PROMPTS, SEEDS, WARPS, V, plain_texts, target


def eagle3(model, k, cls=Eagle3Sampler, parallel=False, **knobs):
    drafter = tiny.eagle3(model, 1, parallel=parallel)
    return cls(model, tiny.tokenizer(model.config.vocab_size), drafter, block_size=k, **knobs)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize(
    ("name", "parallel"), [*((name, False) for name in CASES), (next(iter(CASES)), True)]
)
def test_it_has_the_plain_distribution(name, parallel, rule):
    case = dict(CASES[name])
    eos, k = case.pop("eos", None), case.pop("k")
    model = tiny.causal_lm(case.pop("vocabulary"), eos_token_id=eos)
    sampler = eagle3(model, k, parallel=parallel)
    params = SamplingParams(max_new_tokens=case.pop("new"), verify=rule, **case)
    assert distance(sampler, params, {eos} - {None}) <= 1e-9


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_wrong_rules_fail_the_same_test(monkeypatch, rule):
    params = SamplingParams(max_new_tokens=2, verify=rule)
    model = tiny.causal_lm(3)
    assert distance(eagle3(model, 2), params) <= 1e-9
    assert distance(eagle3(model, 2, verifies_marginals(Eagle3Sampler)), params) > 1e-3
    monkeypatch.setattr(verify, rule, always_take_the_target(verify.rejection))
    assert distance(eagle3(model, 2), params) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(("warp", "parallel"), [*((warp, False) for warp in WARPS), ("all", True)])
@pytest.mark.parametrize("rule", KEYED)
def test_the_text_is_plain_decoding_s(rule, warp, parallel):
    """The batch becomes smaller, and each prompt has the text that it has alone."""
    model = target(layers=3)
    for temperature in (0.0, 1.0):
        params = SamplingParams(20, temperature, verify=rule, **WARPS[warp])
        sampler = eagle3(model, 4, nodes=7, parallel=parallel)
        found = sampler.generate(PROMPTS, params, seeds=SEEDS)
        assert ids(found) == plain_texts(params, layers=3)


Recording = recording(Eagle3Sampler)


@torch.no_grad()
def anew(sampler, prefix):
    """The first token's logits after a prefix, without anything kept."""
    batch = Batch([prefix], len(prefix) + 12, KeyedRandomness([0]), "cpu")
    sampler.begin(batch, SamplingParams(1))
    return Eagle3Sampler.draft_logits(sampler, batch, 4)[0]


def worst(cls, rule, temperature, parallel=False):
    """How far drafts in the course of decoding are from those made anew, at the most."""
    sampler = eagle3(tiny.causal_lm(V, layers=3), 4, cls, parallel)
    sampler.drafts = []
    params = SamplingParams(24, temperature, verify=rule)
    sampler.generate(PROMPTS, params, seeds=SEEDS)
    found = 0.0
    for prefix, logits in sampler.drafts:
        if len(prefix) > 1:  # a prompt of one token has no state yet
            found = max(found, (logits - anew(sampler, prefix)).abs().max().item())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rule", VERIFY)
@pytest.mark.parametrize("parallel", [False, True])
def test_it_reads_the_accepted_tokens(rule, temperature, parallel):
    assert worst(Recording, rule, temperature, parallel) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["coupled", "tree"])
@pytest.mark.parametrize("wrong", [keeps_rejected, forgets_last])
@pytest.mark.parametrize("parallel", [False, True])
def test_wrong_states_are_seen(wrong, rule, parallel):
    assert worst(wrong(Recording), rule, 1.0, parallel) > 1e-3


def test_it_has_no_markov_head():
    with pytest.raises(ValueError, match="markov_head=true is not allowed: an EAGLE-3 drafter has"):
        eagle3(target(), 2, markov_head=True)
    assert eagle3(target(), 2, markov_head=False).markov is None
