"""A user's mistake is one readable line, raised before anything runs."""

import re
from dataclasses import replace

import pytest
import torch

from decoding.engine.params import USUAL, SamplingParams
from decoding.engine.warp import warp
from decoding.samplers.jacobi import JacobiSampler
from decoding.samplers.plain import PlainSampler
from tests.support import tiny

BAD = [
    ({"max_new_tokens": 0}, "max_new_tokens=0 "),
    ({"max_new_tokens": -3}, "max_new_tokens=-3 "),
    ({"temperature": -0.1}, "temperature=-0.1 "),
    ({"temperature": float("nan")}, "temperature=nan "),
    ({"top_k": -1}, "top_k=-1 "),
    ({"top_p": 0.0}, "top_p=0.0 "),
    ({"top_p": 1.5}, "top_p=1.5 "),
    ({"min_p": 1.0}, "min_p=1.0 "),
    ({"min_p": -0.5}, "min_p=-0.5 "),
    ({"repetition_penalty": 0.0}, "repetition_penalty=0.0 "),
    ({"stop": ("x", "")}, "stop=('x', '') "),
    ({"stop": "ab"}, "stop='ab' "),
    ({"block_size": 0}, "block_size=0 "),
    # What float32 does not hold, and what is no number.
    ({"temperature": 1e-38}, "temperature=1e-38 "),
    ({"temperature": 5e-324}, "temperature=5e-324 "),
    ({"temperature": 1e39}, "temperature=1e+39 "),
    ({"temperature": 10**400}, "temperature=1000000"),
    ({"temperature": 10**5000}, "temperature=an integer of 16610 bits "),
    ({"temperature": "0.7"}, "temperature='0.7' "),
    ({"temperature": True}, "temperature=True "),
    ({"repetition_penalty": 1e-40}, "repetition_penalty=1e-40 "),
    ({"repetition_penalty": 10**30}, "repetition_penalty=1000000"),
    ({"top_p": None}, "top_p=None "),
    ({"top_k": 2.5}, "top_k=2.5 "),
    ({"seed": 1.5}, "seed=1.5 "),
    ({"max_new_tokens": 10**400}, "max_new_tokens=1000000"),
    ({"block_size": 2.5}, "block_size=2.5 "),
    ({"stop": ("a", 3)}, "stop=('a', 3) "),
    ({"stop": None}, "stop=None "),
    ({"verify": "magic"}, "['coupled', 'rejection', 'block', 'tree']"),
]


@pytest.mark.parametrize(("values", "named"), BAD)
def test_a_bad_parameter_is_named_with_what_is_allowed(values, named):
    with pytest.raises(ValueError, match=re.escape(named)) as error:
        SamplingParams(**values)
    assert "must be" in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 200


def test_the_ends_of_every_range_are_allowed():
    SamplingParams(max_new_tokens=1, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)
    SamplingParams(top_p=1e-6, min_p=0.999, repetition_penalty=0.5, block_size=1, stop=("a",))


COLD = [1.2e-38, 1e-37, 1e-30, 1e-10]


@pytest.mark.parametrize("temperature", COLD)
@pytest.mark.parametrize("options", [{}, {"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 3}], ids=str)
def test_the_coldest_temperatures_have_the_right_distribution(temperature, options):
    """All weight is on the largest logit, and equal ones share it."""
    logits = torch.tensor([[[-3e4, 7.0, 2.0], [5.0, 1.0, 5.0], [-8.0, -9.0, -8.5]]])
    logits = torch.cat([logits, logits + 900])
    params = SamplingParams(temperature=temperature, **options)
    expected = torch.tensor([[0.0, 1, 0], [0.5, 0, 0.5], [1, 0, 0]]).expand(2, 3, 3)
    assert torch.equal(warp(logits, params).softmax(-1), expected)


def test_the_quotient_alone_fails_the_same_test(monkeypatch):
    monkeypatch.setattr("decoding.engine.warp.COLD", 0.0)
    params = SamplingParams(temperature=COLD[0])
    assert warp(torch.tensor([[[90.0, 900.0]]]), params).softmax(-1).isnan().all()


@pytest.mark.parametrize(
    "extreme",
    [
        {"temperature": 3.4e38}, {"temperature": 10**30}, {"temperature": COLD[0]},
        {"repetition_penalty": 1e-20}, {"repetition_penalty": 10**20},
        {"repetition_penalty": 1e20, "temperature": COLD[0]},
        {"repetition_penalty": 1e-20, "temperature": 3e38},
        {"top_p": 5e-324}, {"min_p": 5e-324}, {"min_p": 1 - 2**-53}, {"top_k": 10**30},
        {"seed": -(10**300)},
    ],
    ids=str,
)  # fmt: skip
def test_drafts_change_nothing_at_the_ends_of_the_ranges(extreme):
    model, tokenizer = tiny.causal_lm(12).float(), tiny.tokenizer(12)
    params = SamplingParams(**{"max_new_tokens": 10, "seed": 1, **extreme})
    plain = PlainSampler(model, tokenizer).generate([[1, 2, 3]], params)[0].token_ids
    drafted = JacobiSampler(model, tokenizer, block_size=4).generate([[1, 2, 3]], params)[0]
    assert drafted.token_ids == plain
    if params.temperature == COLD[0] and params.repetition_penalty == 1:
        greedy = replace(params, temperature=0)
        assert PlainSampler(model, tokenizer).generate([[1, 2, 3]], greedy)[0].token_ids == plain


REQUESTS = [
    ([[]], {}, "the prompt is empty"),
    ([""], {}, "the prompt is empty"),
    ([], {}, "no prompt was given"),
    ([[1, 6]], {}, "token 6 is outside the target's vocabulary of 6"),
    ([[-1]], {}, "token -1 is outside"),
    ([[1] * 30], {}, "the target's context of 32"),
    ([[1], [2]], {"seeds": [1]}, "1 seeds were given for 2 prompts"),
]


def short_context():
    model = tiny.causal_lm(6)
    model.config.max_position_embeddings = 32
    return PlainSampler(model, tiny.tokenizer(6))


@pytest.mark.parametrize(("prompts", "options", "message"), REQUESTS)
def test_a_bad_request_is_one_line(prompts, options, message):
    sampler = short_context()
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        sampler.generate(prompts, SamplingParams(max_new_tokens=3), **options)
    assert "\n" not in str(error.value)


def test_a_prompt_that_just_fits_the_context_runs():
    [result] = short_context().generate([[1] * 29], SamplingParams(max_new_tokens=3))
    assert len(result.token_ids) == 3


def test_an_answer_of_no_given_length_gets_the_room_that_there_is():
    prompts, free = [[1] * 29, [1], [1] * 31], SamplingParams(temperature=0, ignore_eos=True)
    for at_once in (None, 2):
        results = short_context().generate(prompts, free, at_once=at_once)
        assert [len(r.token_ids) for r in results] == [3, 31, 1]
    wide = PlainSampler(tiny.causal_lm(6), tiny.tokenizer(6))
    assert len(wide.generate([[1]], free)[0].token_ids) == USUAL
    with pytest.raises(
        ValueError, match="32 tokens, no room for an answer in the target's context"
    ):
        short_context().generate([[1] * 32], free)
    for given in (4, USUAL):  # the control: a length that is given is not changed
        with pytest.raises(ValueError, match=f"max_new_tokens={given}, together more than"):
            short_context().generate(prompts[:1], replace(free, max_new_tokens=given))
