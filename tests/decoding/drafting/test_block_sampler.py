"""A sampler decodes in the fastest way for so many requests; text and drafter stay the same."""

import pytest
import torch

from decoding.drafting import state_reader
from decoding.drafting.block_drafter import for_requests
from decoding.drafting.state_reader import StateReader, UnreadStates
from decoding.engine.batch import Batch
from decoding.engine.params import VERIFY, SamplingParams
from decoding.engine.randomness import KeyedRandomness
from decoding.samplers.dflash import DFlashSampler
from decoding.samplers.eagle3 import Eagle3Sampler
from decoding.samplers.ngram import NgramSampler
from decoding.samplers.plain import PlainSampler
from tests.support import tiny
from tests.support.exact import CASES, distance
from tests.support.results import ids
from tests.support.samplers import dflash, recording
from tests.support.texts import PROMPTS, SEEDS, V, deer, random_drafter, target

# Three requests at the most, of which two go on without drafts and the last one with them.
WAYS = {"1": {"0": "chain"}, "2": {"0": "plain"}, "3": {"0": "tree"}}
BLOCKS = {
    "dflash": {},
    "tail": {"layout": "dspark", "context": "layerwise", "layers": [0, 1], "tail": 2},
}
NEW = [16, 6, 24, 11, 9]  # tokens of each answer


def sampler_of(kind, model, cls=DFlashSampler, **knobs):
    if kind == "deer":
        return deer(model, random_drafter(), 4, **knobs)
    if kind == "eagle3":
        cls = cls if issubclass(cls, Eagle3Sampler) else Eagle3Sampler
        return cls(model, tiny.tokenizer(V), tiny.eagle3(model, 1), block_size=4, **knobs)
    return dflash(model, 4, cls, **BLOCKS[kind], **knobs)


def decode(sampler, params, at_once=3):
    each = [SamplingParams(n, params.temperature, verify=params.verify) for n in NEW]
    return sampler.generate(PROMPTS, each, seeds=SEEDS, at_once=at_once)


@pytest.mark.parametrize("kind", ["deer", "eagle3", *BLOCKS])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_text_is_plain_decoding_s_whatever_is_fastest(kind, temperature):
    """Requests join and leave, so a request is decoded in all ways; prompt lookup goes on."""
    params, model = SamplingParams(temperature=temperature), target(layers=3)
    wanted = ids(decode(PlainSampler(model, tiny.tokenizer(V)), params, at_once=1))
    found = decode(sampler_of(kind, model, fastest=WAYS, nodes=6), params)
    assert ids(found) == wanted
    drafted = {n for r in found for n in (r.stats.drafted / r.stats.target_passes,)}
    assert len(drafted) > 1
    alone = decode(sampler_of(kind, model, fastest="plain"), params, at_once=1)
    assert ids(alone) == wanted
    assert all(set(r.stats.emitted) == {1} and r.stats.drafted == 0 for r in alone)


@pytest.mark.parametrize("verify", VERIFY)
def test_who_asks_for_drafts_gets_them(verify):
    sampler = sampler_of("dflash", target(layers=3), fastest="plain")
    for temperature, k in ((0.0, None), (1.0, None), (1.0, 2)):
        params = SamplingParams(8, temperature, verify=verify, block_size=k)
        (found,) = sampler.generate([[1, 2, 3]], params, seeds=[1])
        assert (found.stats.drafted > 0) == (verify == "tree" or k is not None)
        assert bool(sampler.told(params)) == (found.stats.drafted == 0)


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_without_drafts_it_has_the_plain_distribution(rule):
    case = dict(next(iter(CASES.values())))
    eos, k = case.pop("eos", None), case.pop("k")
    model = tiny.causal_lm(case.pop("vocabulary"), eos_token_id=eos)
    params = SamplingParams(max_new_tokens=case.pop("new"), verify=rule, **case)
    assert distance(dflash(model, k, fastest="plain"), params, {eos} - {None}) <= 1e-9


@torch.no_grad()
def worst(kind, temperature):
    """How far drafts in the course of decoding are from those made anew, at the most."""
    cls = Eagle3Sampler if kind == "eagle3" else DFlashSampler
    sampler = sampler_of(kind, tiny.causal_lm(V, layers=3), recording(cls), fastest=WAYS)
    sampler.drafts, found = [], 0.0
    decode(sampler, SamplingParams(temperature=temperature))
    recorded, params = [*sampler.drafts], SamplingParams(1)
    for prefix, logits in recorded:
        if len(prefix) == 1:  # EAGLE-3 has no state yet
            continue
        batch = Batch([prefix], len(prefix) + 12, KeyedRandomness([0]), "cpu")
        sampler.begin(batch, params)
        right = cls.draft_logits(sampler, batch, len(logits))[0]
        known = right.isfinite()
        found = max(found, (logits - right)[known].abs().max().item())
    return found


@pytest.mark.parametrize("most", [2, state_reader.MOST_UNREAD])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", [*BLOCKS, "eagle3"])
def test_the_drafter_reads_what_was_decoded_without_it(monkeypatch, kind, temperature, most):
    monkeypatch.setattr(state_reader, "MOST_UNREAD", most)
    assert worst(kind, temperature) < 1e-9


@pytest.mark.parametrize("kind", BLOCKS)
def test_a_drafter_that_forgets_what_was_decoded_without_it_is_seen(monkeypatch, kind):
    add = UnreadStates.add

    def forgets(self, states, counts):
        self.take()
        add(self, states, counts)

    monkeypatch.setattr(UnreadStates, "add", forgets)
    assert worst(kind, 1.0) > 1e-3


def test_few_states_wait(monkeypatch):
    """A long answer without drafts takes no memory for each of its tokens."""
    monkeypatch.setattr(state_reader, "MOST_UNREAD", 5)
    widths, undrafted = [], StateReader.undrafted

    def watched(self, batch, params):
        widths.append(batch.state.states.shape[1])
        return undrafted(self, batch, params)

    monkeypatch.setattr(StateReader, "undrafted", watched)
    sampler = sampler_of("dflash", target(layers=3), fastest="plain")
    sampler.generate([[1, 2, 3]], SamplingParams(40), seeds=[1])
    assert len(widths) > 30
    assert max(widths) == 6


@pytest.mark.parametrize(
    ("requests", "number"), [(1, 1), (3, 1), (4, 16), (8, 16), (16, 16), (60, 16)]
)
def test_settings_are_those_of_the_nearest_number_of_requests_by_ratio(requests, number):
    assert for_requests({1: 1, 16: 16}, requests) == number
    assert for_requests({16: 16, 1: 1}, requests) == number
    assert for_requests({0: "a stranger's"}, requests)


@pytest.mark.parametrize(
    ("least", "large"),
    [
        (0.99, []),
        (0.0, [0.0, 1.0]),
        ({"1": {"0": 0.99, "1": 0.0}}, [1.0]),  # text, as in an export's config.json
        ({"1": {"0": 0.0, "1": 0.99}, "16": 0.5}, [0.0]),
    ],
)
def test_the_least_probability_may_depend_on_the_temperature(least, large):
    """Trees are `large` where it is 0."""
    sampler = NgramSampler(tiny.causal_lm(3).float(), tiny.tokenizer(3), nodes=5, least=least)
    found = []
    for temperature in (0.0, 1.0):
        params = SamplingParams(12, temperature, verify="tree", seed=0, ignore_eos=True)
        (result,) = sampler.fresh().generate(["abcabc"], params)
        if result.stats.drafted > result.stats.target_passes:
            found.append(temperature)
    assert found == large
