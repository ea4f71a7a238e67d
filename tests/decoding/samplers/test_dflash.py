"""DFlash decodes losslessly, and its context is the accepted tokens', never a rejected one's."""

import pytest
import torch

from decoding.engine import verify
from decoding.engine.batch import Batch
from decoding.engine.params import KEYED, VERIFY, SamplingParams
from decoding.engine.randomness import KeyedRandomness
from decoding.samplers.dflash import DFlashSampler
from models.dflash import DFlashDraftModel
from tests.support import tiny
from tests.support.exact import (
    CASES,
    always_take_the_target,
    distance,
    forget_the_temperature,
    go_on_after_a_rejection,
)
from tests.support.results import ids
from tests.support.samplers import dflash, forgets_last, keeps_rejected
from tests.support.texts import PROMPTS, SEEDS, WARPS, V, plain_texts, target

BLOCKS = [
    {},
    {"layout": "dspark"},
    {"layout": "dspark", "causal": True, "context": "layerwise"},
    {"layout": "dspark", "tail": 1, "least": 0.1, "least_gain": 0.3},
    {"layout": "dspark", "context": "layerwise", "layers": [0, 1], "tail": 2},
    {"layout": "dspark", "context": "shared", "layers": [1, 0], "markov_rank": 2},
    {"layout": "dspark", "context": "shared", "layers": [0, 1], "tail": 2},
    {"window": 5},
    {"layout": "dspark", "markov_rank": 2},
]


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize(
    ("name", "blocks"),
    [*((name, {}) for name in CASES), *((next(iter(CASES)), blocks) for blocks in BLOCKS[1:])],
)
def test_it_has_the_plain_distribution(name, blocks, rule):
    case = dict(CASES[name])
    eos, k = case.pop("eos", None), case.pop("k")
    sampler = dflash(tiny.causal_lm(case.pop("vocabulary"), eos_token_id=eos), k, **blocks)
    params = SamplingParams(max_new_tokens=case.pop("new"), verify=rule, **case)
    assert distance(sampler, params, {eos} - {None}) <= 1e-9


@pytest.mark.parametrize(
    "wrong", [always_take_the_target, go_on_after_a_rejection, forget_the_temperature]
)
def test_a_wrong_rule_fails_the_same_test(monkeypatch, wrong):
    sampler = dflash(tiny.causal_lm(3), 2)
    params = SamplingParams(max_new_tokens=2, verify="block")
    assert distance(sampler, params) <= 1e-9
    monkeypatch.setattr(verify, "block", wrong(verify.rejection))
    assert distance(sampler, params) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("warp", "blocks"),
    [*((warp, {}) for warp in WARPS), *((next(iter(WARPS)), blocks) for blocks in BLOCKS[1:])],
)
@pytest.mark.parametrize("rule", KEYED)
def test_the_text_is_plain_decoding_s(rule, warp, blocks):
    """Of every prompt alone, in a batch that becomes smaller, at T=0 and T=1."""
    model = target(layers=3)
    for temperature in (0.0, 1.0):
        params = SamplingParams(20, temperature, verify=rule, **WARPS[warp])
        found = dflash(model, 4, **blocks).generate(PROMPTS, params, seeds=SEEDS)
        assert ids(found) == plain_texts(params, layers=3)


class Recording(DFlashSampler):
    """Keeps every draft with the prefix that it was made after."""

    def draft_pass(self, batch, k, params):
        logits = super().draft_pass(batch, k, params)
        for tokens, n, row in zip(batch.tokens.tolist(), batch.lengths.tolist(), logits):
            self.drafts.append((tokens[:n], row))
        return logits


@torch.no_grad()
def anew(sampler, prefix, k, params):
    """The draft after a prefix, without anything kept."""
    batch = Batch([prefix], len(prefix) + k + 8, KeyedRandomness([0]), "cpu")
    sampler.begin(batch, params)
    return DFlashSampler.draft_pass(sampler, batch, k, params)[0]


def worst(cls, rule, temperature, **blocks):
    """How far drafts in the course of decoding are from those made anew, at the most."""
    model, k = tiny.causal_lm(V, layers=3), 4
    sampler = dflash(model, k, cls, **blocks)
    sampler.drafts = []
    params = SamplingParams(24, temperature, verify=rule)
    sampler.generate(PROMPTS, params, seeds=SEEDS)
    found = 0.0
    for prefix, logits in sampler.drafts:
        right = anew(sampler, prefix, k, params)
        known = right.isfinite()
        found = max(found, (logits - right)[known].abs().max().item())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rule", VERIFY)
def test_the_context_follows_the_accepted_tokens(rule, temperature, blocks):
    assert worst(Recording, rule, temperature, **blocks) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["coupled", "tree"])
@pytest.mark.parametrize("wrong", [keeps_rejected, forgets_last])
def test_a_wrong_context_is_seen(wrong, rule):
    assert worst(wrong(Recording), rule, 1.0) > 1e-3


class KeepingLogits(DFlashSampler):
    """Keeps the logits of every run of its drafter."""

    def fitted(self, logits, excluded):
        self.logits.append(logits)
        return super().fitted(logits, excluded)


def drafted(context, rule, tail, layers=(1, 2)):
    """The logits of a drafter that makes keys and values of its context as its target does."""
    model = tiny.causal_lm(V, layers=3)
    blocks = {"layout": "dspark", "causal": True, "layers": [*layers], "tail": tail}
    sampler = dflash(model, 4, KeepingLogits, context=context, **blocks)
    for ours, i in zip(sampler.drafter.layers, layers):
        theirs = model.model.layers[i]
        ours.input_layernorm.load_state_dict(theirs.input_layernorm.state_dict())
        for name in ("k_proj", "v_proj"):
            part = getattr(theirs.self_attn, name)
            getattr(ours.self_attn, name).load_state_dict(part.state_dict())
    sampler.logits = []
    sampler.generate(PROMPTS, SamplingParams(24, 1.0, verify=rule), seeds=SEEDS)
    return sampler.logits


def largest_difference(found, expected):
    return max((a - b).abs().max().item() for a, b in zip(found, expected) if a.shape == b.shape)


@pytest.mark.parametrize("tail", [0, 2])
@pytest.mark.parametrize("rule", VERIFY)
def test_a_shared_context_is_what_the_drafter_would_make(monkeypatch, rule, tail):
    expected, found = drafted("layerwise", rule, tail), drafted("shared", rule, tail)
    assert [x.shape for x in found] == [x.shape for x in expected]
    assert largest_difference(found, expected) < 1e-9
    # Negative control: the keys and values of the layer before.
    monkeypatch.setattr(DFlashDraftModel, "originals", property(lambda s: s.target_layer_ids))
    assert largest_difference(drafted("shared", rule, tail)[:1], expected) > 1e-3


@pytest.mark.parametrize("tail", [0, 2])
@pytest.mark.parametrize("at_once", [1, 2, 3])
def test_a_shared_context_is_kept_while_requests_come_and_go(at_once, tail):
    """Two requests are decoded without drafts, one or three by trees, which no state waits for."""
    blocks = {"layout": "dspark", "context": "shared", "layers": [0, 2], "tail": tail}
    known = {1: {0: "tree"}, 2: {0: "plain"}, 3: {0: "tree"}}
    sampler = dflash(target(layers=3), 4, fastest=known, **blocks)
    for temperature in (0.0, 1.0):
        params = SamplingParams(20, temperature)
        found = sampler.generate(PROMPTS, params, seeds=SEEDS, at_once=at_once)
        assert ids(found) == plain_texts(params, layers=3)
        assert any(result.stats.drafter_passes for result in found)


def test_a_shared_context_of_a_layer_that_the_target_lacks_is_refused():
    model = tiny.causal_lm(V, layers=3)
    drafter = tiny.dflash(model, layout="dspark", context="shared", layers=[2])
    drafter.target_layer_ids = (2,)  # of a stranger's config: the state after the last layer
    with pytest.raises(ValueError, match="layer 3 is not there"):
        DFlashSampler(model, tiny.tokenizer(V), drafter, block_size=4, mask_id=V - 1)
