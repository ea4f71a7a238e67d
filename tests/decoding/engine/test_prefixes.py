"""Prefix reuse: the same texts, fewer tokens read, a bound in bytes, and wrong keys and values."""

import gc

import pytest
import torch

from decoding.engine.params import KEYED, SamplingParams
from decoding.engine.prefixes import Prefixes
from decoding.samplers.plain import PlainSampler
from decoding.samplers.redrafter import RedrafterSampler
from tests.support import texts, tiny
from tests.support.results import ids
from tests.support.samplers import dflash
from tests.support.texts import V

PART = 16
SYSTEM = [(7 * i + i // 5) % V for i in range(60)]  # what all prompts begin with
FIRST = [[*SYSTEM, 1, 2], [*SYSTEM, 3], [*SYSTEM[:50], 4, 4]]


def makes():
    model = texts.target()
    return {
        "plain": PlainSampler(model, tiny.tokenizer(V)),
        "deer": texts.deer(model, texts.random_drafter(), 4),
        "shared context": dflash(model, 4, context="shared", layers=[1]),
        "the last state": RedrafterSampler(
            model, tiny.tokenizer(V), tiny.redrafter(model), block_size=4
        ),
        "its own states": dflash(model, 4),  # which are not kept: all is read
    }


def conversation(sampler, params, at_once=None):
    """The answers to prompts, and to longer ones that go on from each answer."""
    first = sampler.generate(FIRST, params, at_once=at_once)
    later = [prompt + answer + [5, 6] for prompt, answer in zip(FIRST, ids(first))]
    return [*first, *sampler.generate(later, params, at_once=at_once)]


def reused(results):
    return sum(result.stats.reused for result in results)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rule", KEYED)
def test_texts_are_the_same_and_less_is_read(rule, temperature):
    params = SamplingParams(max_new_tokens=20, temperature=temperature, verify=rule, seed=3)
    for name, sampler in makes().items():
        plain = conversation(sampler, params)
        sampler.prefixes = Prefixes(10**9, PART)
        found = [conversation(sampler, params, at_once=1), conversation(sampler, params)]
        assert ids(found[0]) == ids(found[1]) == ids(plain), name
        assert reused(plain) == 0
        if name == "its own states":
            assert [reused(results) for results in found] == [0, 0]
            assert sampler.prefixes.size == 0
        else:
            assert [reused(results) >= 4 * 48 for results in found] == [True, True], name


def test_wrong_keys_and_values_change_the_texts():
    """The negative control: what is kept is read."""
    sampler = makes()["plain"]
    params = SamplingParams(max_new_tokens=20, seed=3)
    expected = conversation(sampler, params)
    sampler.prefixes = Prefixes(10**9, PART)
    conversation(sampler, params)
    for _, kept in sampler.prefixes._kept.values():
        for memory in kept.stored.memory.values():
            memory.neg_()
    assert ids(conversation(sampler, params)) != ids(expected)


def test_bytes_are_bounded_and_the_last_used_stay():
    sampler = makes()["plain"]
    one = SamplingParams(max_new_tokens=1, seed=1)
    sampler.prefixes = every = Prefixes(10**9, PART)
    prompts = [[i, *SYSTEM] for i in range(6)]
    sampler.generate(prompts, one, at_once=1)
    size = every.size // 6
    sampler.prefixes = few = Prefixes(2 * size, PART)
    sampler.generate(prompts, one, at_once=1)
    assert few.size <= few.most < every.size
    known = [few.common(sampler.target, prompt) for prompt in prompts]
    assert known == [0, 0, 0, 0, 48, 48]  # whole parts of the 60 tokens that are read
    sampler.generate([[*prompts[4], 1], [11, *SYSTEM]], one, at_once=1)
    assert few.common(sampler.target, prompts[4]) > 0  # used since
    assert few.common(sampler.target, prompts[5]) == 0
    sampler.prefixes = none = Prefixes(size // 2, PART)
    sampler.generate(prompts[:1], one)
    assert none.size == 0


def test_a_text_that_another_one_contains_is_kept_once():
    sampler, one = makes()["plain"], SamplingParams(max_new_tokens=1, temperature=0)
    sampler.prefixes = prefixes = Prefixes(10**9, PART)
    sizes = []
    for count in (40, 60, 50, 60):
        sampler.generate([SYSTEM[:count]], one)
        sizes.append(prefixes.size)
    assert sizes[1] == sizes[2] == sizes[3] == 3 * sizes[0] / 2
    assert [prefixes.common(sampler.target, SYSTEM[:n]) for n in (15, 16, 47, 60)] == [
        0,
        16,
        32,
        48,
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_prompt_that_is_known_whole(dtype):
    """Nothing is left to read but the last token."""
    model = texts.target().to(dtype)
    sampler = PlainSampler(model, tiny.tokenizer(V))
    params = SamplingParams(max_new_tokens=12, temperature=0)
    prompt = SYSTEM[:49]
    expected = ids(sampler.generate([prompt], params))
    sampler.prefixes = Prefixes(10**9, PART)
    found = [sampler.generate([prompt], params) for _ in range(3)]
    assert all(ids(results) == expected for results in found)
    assert [reused(results) for results in found] == [0, 48, 48]


def test_all_samplers_of_a_server_read_prompts_in_the_same_parts(monkeypatch):
    """Else rounding would tell a drafter that keeps nothing from plain decoding."""
    widths = {}
    for name, sampler in makes().items():
        sampler.prefixes, seen = Prefixes(10**9, PART), []
        right = type(sampler.target).forward

        def forward(self, *args, right=right, seen=seen, **kwargs):
            seen.append(kwargs["input_ids"].shape[1])
            return right(self, *args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(type(sampler.target), "forward", forward)
            sampler.begin(*sampler.start(SYSTEM))
        widths[name] = seen[:4]
    assert [*widths.values()] == [[16, 16, 16, 11]] * len(widths), widths


def test_the_passes_that_are_left_have_the_same_bits():
    """In bfloat16 too, logits after a prompt are those of a prompt that was read whole."""
    model = texts.target(hidden=64).bfloat16()
    sampler, prompt, found = PlainSampler(model, tiny.tokenizer(V)), [*SYSTEM, 3, 3], []
    known = []
    sampler.prefixes = Prefixes(10**9, PART)
    for _ in range(2):
        batch, params = sampler.start(prompt)
        with torch.inference_mode():
            sampler.begin(batch, params)
            found.append(sampler.target_pass(batch, batch.tokens[:, :0], params).logits)
        sampler.ended(batch, [0])
        known.append(batch.reused)
    assert known == [0, 48]
    assert found[0].equal(found[1])


def test_what_was_kept_for_a_network_that_is_gone_is_dropped():
    """Its number in memory may be another network's next."""
    one, other = makes()["plain"], makes()["plain"]
    one.prefixes = other.prefixes = kept = Prefixes(10**9, PART)
    params = SamplingParams(max_new_tokens=1)
    one.generate([SYSTEM], params)
    size = kept.size
    del one
    gc.collect()
    assert kept.common(other.target, SYSTEM) == 0
    other.generate([SYSTEM], params)
    assert (kept.size, len(kept._kept)) == (size, 1)
    assert kept.common(other.target, SYSTEM) == 48
