"""Exactness: the output distribution of the sampler code equals that of plain decoding."""

import pytest

from decoding.engine import verify
from decoding.engine.params import SamplingParams
from decoding.samplers.plain import PlainSampler
from tests.support import tiny
from tests.support.exact import (
    CASES,
    always_take_the_target,
    deer,
    distance,
    first_cycle,
    forget_the_temperature,
    go_on_after_a_rejection,
)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("name", CASES)
def test_deer_has_the_plain_distribution(name, rule):
    case = dict(CASES[name])
    eos = case.pop("eos", None)
    sampler = deer(case.pop("vocabulary"), case.pop("k"), eos)
    params = SamplingParams(max_new_tokens=case.pop("new"), verify=rule, **case)
    assert distance(sampler, params, {eos} - {None}) <= 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("name", CASES)
def test_a_causal_drafter_has_the_plain_distribution(name, rule):
    """PARD's layout; its mask is a token that the target may say, and it never drafts that."""
    case = dict(CASES[name])
    eos = case.pop("eos", None)
    sampler = deer(case.pop("vocabulary"), case.pop("k"), eos, attention="causal")
    params = SamplingParams(max_new_tokens=case.pop("new"), verify=rule, **case)
    assert distance(sampler, params, {eos} - {None}) <= 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("form", [{}, {"shifted": True}], ids=str)
def test_a_drafter_without_a_cache_has_the_plain_distribution(rule, form):
    sampler = deer(3, 2, attention="bidirectional", **form)
    for new in (2, 3):
        assert distance(sampler, SamplingParams(max_new_tokens=new, verify=rule)) <= 1e-9


@pytest.mark.parametrize("case", [c for c in CASES if "k" not in c.split("=")[0] or c == "top-k"])
def test_plain_decoding_has_the_plain_distribution(case):
    case = dict(CASES[case])
    case.pop("k")
    eos = case.pop("eos", None)
    sampler = PlainSampler(
        tiny.causal_lm(case["vocabulary"], eos_token_id=eos), tiny.tokenizer(case.pop("vocabulary"))
    )
    params = SamplingParams(max_new_tokens=case.pop("new"), verify="rejection", **case)
    assert distance(sampler, params, {eos} - {None}) <= 1e-9


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("drafter_vocabulary", [5, 9])
def test_padded_vocabularies_of_either_side(rule, drafter_vocabulary):
    """The drafter's vocabulary may be smaller or larger than the target's (padding rows)."""
    sampler = deer(4, 2, drafter_vocabulary=drafter_vocabulary)
    params = SamplingParams(max_new_tokens=2, verify=rule)
    assert distance(sampler, params) <= 1e-9


@pytest.mark.parametrize("form", [{}, {"attention": "causal"}], ids=str)
@pytest.mark.parametrize(
    "wrong", [always_take_the_target, go_on_after_a_rejection, forget_the_temperature]
)
def test_a_wrong_rule_fails_the_same_test(monkeypatch, wrong, form):
    sampler = deer(3, 2, **form)
    right, original = SamplingParams(max_new_tokens=2, verify="block"), verify.rejection
    assert distance(sampler, right) <= 1e-9
    monkeypatch.setattr(verify, "block", wrong(original))
    assert verify.rejection is original
    assert distance(sampler, right) > 1e-3


def test_block_verification_accepts_no_less_than_rejection():
    """Expected tokens of the first cycle, exactly, over several random pairs of models."""
    gains = []
    for seed in range(4):
        sampler, expected = deer(3, 3, seed=10 * seed), {}
        for rule in ("rejection", "block"):
            expected[rule] = first_cycle(sampler, rule)
        gains.append(expected["block"] - expected["rejection"])
    assert min(gains) >= -1e-12
    assert max(gains) > 1e-3
