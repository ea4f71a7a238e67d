"""Exactness: the output distribution of the sampler code equals that of plain decoding."""

import pytest
import torch

from decoding.engine import verify
from decoding.engine.params import SamplingParams
from decoding.samplers.deer import DeerSampler
from decoding.samplers.plain import PlainSampler
from tests.support import tiny
from tests.support.enumerating import output_distribution


def deer(vocabulary, k, eos=None, seed=0, drafter_vocabulary=None, **form):
    target = tiny.causal_lm(vocabulary, seed=seed, eos_token_id=eos)
    size = drafter_vocabulary or vocabulary + 2
    tokens = {"mask_id": size - 2, "sep_id": size - 1}
    if form.get("attention") == "causal":  # PARD: exactly the target's vocabulary
        size, tokens = vocabulary, {"mask_id": vocabulary - 1}
    drafter = tiny.causal_lm(size, seed=seed + 1)
    return DeerSampler(target, tiny.tokenizer(vocabulary), drafter, block_size=k, **tokens, **form)


def distance(sampler, params, eos=()):
    prompt = [0, 1, 1]
    distribution = output_distribution(sampler, prompt, params)
    return tiny.total_variation(
        distribution, tiny.plain_distribution(sampler.target, prompt, params, eos)
    )


CASES = {
    "two tokens, k=3": dict(vocabulary=2, k=3, new=3),
    "three tokens, k=2": dict(vocabulary=3, k=2, new=2),
    "k beyond the answer": dict(vocabulary=2, k=4, new=2),
    "k=1": dict(vocabulary=3, k=1, new=3),
    "eos inside a block": dict(vocabulary=3, k=2, new=3, eos=2),
    "cold": dict(vocabulary=3, k=2, new=2, temperature=0.4),
    "hot": dict(vocabulary=3, k=2, new=2, temperature=1.7),
    "greedy": dict(vocabulary=3, k=2, new=4, temperature=0.0),
    "top-k": dict(vocabulary=4, k=2, new=2, top_k=2),
    "top-p": dict(vocabulary=3, k=2, new=2, top_p=0.8),
    "min-p": dict(vocabulary=3, k=2, new=2, min_p=0.3),
    "penalty": dict(vocabulary=3, k=2, new=2, repetition_penalty=1.5),
}


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("name", CASES)
def test_deer_has_the_plain_distribution(name, rule):
    case = dict(CASES[name])
    eos = case.pop("eos", None)
    sampler = deer(case.pop("vocabulary"), case.pop("k"), eos)
    params = SamplingParams(max_new_tokens=case.pop("new"), verify=rule, **case)
    assert distance(sampler, params, {eos} - {None}) <= 1e-9


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("name", CASES)
def test_a_causal_drafter_has_the_plain_distribution(name, rule):
    """PARD's layout; its mask is a token that the target may say, and it never drafts that."""
    case = dict(CASES[name])
    eos = case.pop("eos", None)
    sampler = deer(case.pop("vocabulary"), case.pop("k"), eos, attention="causal")
    params = SamplingParams(max_new_tokens=case.pop("new"), verify=rule, **case)
    assert distance(sampler, params, {eos} - {None}) <= 1e-9


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


def always_take_the_target(draft, q, p, randomness):
    """Wrong: a correction drawn from p instead of the residual."""
    accepted, _ = verify.rejection(draft, q, p, randomness)
    return accepted, randomness.categorical(verify._at(p, accepted))


def go_on_after_a_rejection(draft, q, p, randomness):
    """Wrong: counts tokens after a rejection, which were conditioned on the wrong prefix."""
    coins = randomness.accept(verify.acceptance_probability(draft, q, p))
    accepted = coins.sum(1)
    rest = verify.residual(verify._at(p, accepted), verify._drafted_at(q, accepted))
    return accepted, randomness.categorical(rest)


def forget_the_temperature(draft, q, p, randomness):
    """Wrong: the ratio with a q that the draft was not drawn from."""
    return verify.rejection(draft, (q.log() / 2).softmax(-1), p, randomness)


@pytest.mark.parametrize("form", [{}, {"attention": "causal"}], ids=str)
@pytest.mark.parametrize(
    "wrong", [always_take_the_target, go_on_after_a_rejection, forget_the_temperature]
)
def test_a_wrong_rule_fails_the_same_test(monkeypatch, wrong, form):
    sampler = deer(3, 2, **form)
    right, original = SamplingParams(max_new_tokens=2, verify="block"), verify.rejection
    assert distance(sampler, right) <= 1e-9
    monkeypatch.setattr(verify, "block", wrong)
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


def first_cycle(sampler, rule):
    """E[tokens emitted by the first target pass], by enumeration."""
    from tests.support.enumerating import EnumeratingRandomness

    params = SamplingParams(max_new_tokens=sampler.block_size + 1, verify=rule)
    mean, paths = 0.0, [[]]
    while paths:
        randomness = EnumeratingRandomness(paths)
        with torch.inference_mode():
            rows = first_rows(sampler, [0, 1, 1], len(paths), params, randomness)
            _, counts = sampler.cycle(rows, params)
        mean += sum(w * c for w, c in zip(randomness.weight, counts.tolist()))
        paths = randomness.left
    return mean


def first_rows(sampler, prompt, count, params, randomness):
    from decoding.engine.batch import Batch

    capacity = len(prompt) + params.max_new_tokens + sampler.margin(params)
    rows = Batch([prompt] * count, capacity, randomness, "cpu")
    sampler.begin(rows, params)
    return rows
