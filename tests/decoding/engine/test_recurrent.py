"""Targets with recurrent layers: a rejected draft leaves no trace in their states."""

import pytest
import torch
from transformers.cache_utils import DynamicLayer

from decoding.engine import recurrent
from decoding.engine.likelihood import token_scores
from decoding.engine.params import SamplingParams
from decoding.engine.recurrent import RecurrentNetwork, Row
from decoding.samplers.deer import DeerSampler
from decoding.samplers.jacobi import JacobiSampler
from decoding.samplers.jacobi_mr import JacobiMRSampler
from decoding.samplers.plain import PlainSampler
from models.recurrent import KNOWN
from tests.support import tiny
from tests.support.arrivals import texts_of
from tests.support.exact import distance
from tests.support.recurrent import model
from tests.support.results import ids
from tests.support.texts import (
    PROMPTS,
    SEEDS,
    V,
    deer,
    greedy_texts,
    oracle,
    plain_rows,
    random_drafter,
)

# Each kind of state: gated delta net, short convolution, Mamba-2 beside attention, and among it.
SOME = ("qwen3_next", "lfm2", "falcon_h1", "granitemoehybrid")
KINDS = [pytest.param(k, marks=[] if k in SOME else pytest.mark.slow) for k in sorted(KNOWN)]


def forgetful(self, own=Row.go_back):
    """Go back in attention alone."""
    self._states = [{} for _ in self._states]
    own(self)


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_is_the_text_of_transformers_generate(kind):
    target = model(kind, V)
    expected = greedy_texts(target, 20)
    assert len({*map(tuple, expected)}) == len(PROMPTS)
    params = SamplingParams(max_new_tokens=20, temperature=0)
    assert ids(PlainSampler(target, tiny.tokenizer(V)).generate(PROMPTS, params)) == expected


def furthest(target, text, accepted, width=4):
    """How far logits in passes of few tokens, of which some are rejected, are from the whole's."""
    whole = target(text, use_cache=False).logits[0]
    network, start, found = RecurrentNetwork(target), 0, []
    while start + width <= text.shape[1]:
        draft = text[:, start : start + width].clone()
        draft[:, accepted + 1 :] += 1
        at = torch.arange(start, start + width)[None]
        logits = network(draft % V, at, keep=width).logits[0]
        found.append(logits[: accepted + 1])
        start += accepted + 1
    found = torch.cat(found)
    return (found - whole[: len(found)]).abs().max().item()


@torch.inference_mode()
@pytest.mark.parametrize("kind", KINDS)
def test_logits_in_pieces_with_rejections_at_every_position_are_those_of_the_whole(
    kind, monkeypatch
):
    target, text = model(kind, V), torch.arange(30)[None] * 5 % V
    assert furthest(target, text, 0, width=1) < 5e-4  # as plain decoding
    for accepted in (0, 1, 2, 3):
        assert furthest(target, text, accepted) < 5e-4
    monkeypatch.setattr(Row, "go_back", forgetful)
    assert furthest(target, text, 1) > 0.1  # the negative control


@pytest.mark.parametrize(
    ("kind", "temperature", "most"),
    [(kind, *more) for kind in SOME for more in ((0.0, 99), (1.0, 3))] + [("lfm2", 1.0, 0)],
)
def test_drafted_texts_are_plain_decodings(kind, temperature, most, monkeypatch):
    """Whether committed tokens are read again with the draft, or by themselves before."""
    monkeypatch.setattr(recurrent, "MOST_AGAIN", most)
    target = model(kind, V)
    params = SamplingParams(18, temperature, verify="coupled")
    expected = ids(plain_rows(target, params))
    samplers = [
        deer(target, random_drafter(), 3),
        oracle(target, 7, PROMPTS, expected),  # accepts often, and rejects at every fourth
        JacobiSampler(target, tiny.tokenizer(V), block_size=5),
    ]
    for sampler in samplers:
        assert ids(sampler.generate(PROMPTS, params, seeds=SEEDS)) == expected
    (found,) = samplers[1].generate(PROMPTS[:1], params, seeds=SEEDS[:1])
    assert max(found.stats.emitted) >= 4
    assert min(found.stats.emitted) < 8  # of which the drafter knew all but every fourth
    events = [(2, -1), (1, 0), (0, -1), (1, -1)]
    texts = texts_of(samplers[0], params, PROMPTS, SEEDS, events, prefill_tokens=3)
    assert {*texts} >= {1, 2, 3, 4}  # 0 is cancelled
    assert texts == {n: text for n, text in enumerate(expected) if n in texts}


@pytest.mark.parametrize("kind", SOME)
def test_a_state_that_is_not_rolled_back_gives_another_text(kind, monkeypatch):
    """The negative control."""
    target, params = model(kind, V), SamplingParams(18, 1, verify="coupled")
    expected = ids(plain_rows(target, params))
    monkeypatch.setattr(Row, "go_back", forgetful)
    sampler = deer(target, random_drafter(), 3)
    assert ids(sampler.generate(PROMPTS, params, seeds=SEEDS)) != expected


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_drawn_texts_have_the_plain_distribution(rule, monkeypatch):
    target = model("lfm2", 3)
    drafter = tiny.causal_lm(5, seed=1, scale=3.0)
    sampler = DeerSampler(target, tiny.tokenizer(3), drafter, block_size=2, mask_id=3, sep_id=4)
    params = SamplingParams(max_new_tokens=2, verify=rule)
    assert distance(sampler, params) <= 1e-5  # its states are in float32
    monkeypatch.setattr(Row, "go_back", forgetful)
    assert distance(sampler, params) > 1e-3  # the negative control


def test_hidden_states_are_those_of_the_new_tokens():
    target, text = model("lfm2", V), torch.arange(12)[None] * 7 % V
    network, layers = RecurrentNetwork(target, (1, 2)), slice(2, 4)
    with torch.inference_mode():
        whole = target(text, use_cache=False, output_hidden_states=True).hidden_states[layers]
        network(text[:, :6], torch.arange(6)[None], keep=1)
        draft = text[:, 6:9] + torch.tensor([0, 1, 1])
        network(draft % V, torch.arange(6, 9)[None], keep=1)
        found = network(text[:, 7:], torch.arange(7, 12)[None], keep=1)  # and 6 again
    for own, expected in zip(found.hidden_states, whole):
        torch.testing.assert_close(own, expected[:, 7:], atol=1e-5, rtol=1e-4)
        assert not torch.allclose(own, expected[:, 6:11], atol=1e-2)


def test_a_texts_tokens_are_scored():
    target, text = model("qwen3_next", V), [n * 5 % V for n in range(20)]
    found = token_scores(target, text, 1, chunk=6)
    with torch.inference_mode():
        logits = target(torch.tensor([text]), use_cache=False).logits[0].log_softmax(-1)
    expected = logits[range(19), text[1:]].tolist()
    assert [score.log_prob for score in found] == pytest.approx(expected, abs=5e-4)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_trees_and_branches_are_refused(temperature):
    target = model("lfm2", V)
    sampler, params = deer(target, random_drafter(), 3), SamplingParams(9, temperature)
    assert "tree" not in sampler.rules
    sampler.generate(PROMPTS[:1], params)
    told = r"'lfm2' .* chains only: give verify=coupled or rejection"
    with pytest.raises(ValueError, match=told):
        sampler.generate(PROMPTS[:1], SamplingParams(9, temperature, verify="tree"))
    with pytest.raises(ValueError, match=r"'lfm2' model has layers with a recurrent state"):
        JacobiMRSampler(target, tiny.tokenizer(V))


@torch.inference_mode()
@pytest.mark.parametrize(("most", "passes"), [(16, 2), (1, 3)])
def test_tokens_that_are_read_by_themselves_are_a_pass(most, passes, monkeypatch):
    monkeypatch.setattr(recurrent, "MOST_AGAIN", most)
    network, text = RecurrentNetwork(model("lfm2", V)), torch.arange(8)[None]
    network(text[:, :4], torch.arange(4)[None], keep=1)
    network(text[:, 2:6], torch.arange(2, 6)[None], keep=1)
    assert network.passes == passes


@pytest.mark.parametrize("kind", SOME)
@torch.no_grad()
def test_the_bytes_of_a_cache_are_those_of_its_keys_values_and_states(kind):
    network = RecurrentNetwork(model(kind, V))
    assert network.cache.nbytes == 0
    sizes = []
    for start in (0, 4):
        at = torch.arange(start, start + 4)[None]
        network(torch.ones_like(at), at, keep=1)
        sizes.append(network.cache.nbytes)
    keys = [x.keys for x in network.cache.rows[0].cache.layers if isinstance(x, DynamicLayer)]
    grown = sum(2 * k[..., :4, :].nbytes for k in keys)
    assert sizes[0] > sizes[1] - sizes[0] == grown
