"""A user's mistake is one readable line, raised before anything runs."""

import re

import pytest

from decoding.engine.params import SamplingParams
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
    ({"verify": "magic"}, "['coupled', 'rejection', 'block', 'tree']"),
]


@pytest.mark.parametrize(("values", "named"), BAD)
def test_a_bad_parameter_is_named_with_what_is_allowed(values, named):
    with pytest.raises(ValueError, match=re.escape(named)) as error:
        SamplingParams(**values)
    assert "must be" in str(error.value)
    assert "\n" not in str(error.value)


def test_the_ends_of_every_range_are_allowed():
    SamplingParams(max_new_tokens=1, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)
    SamplingParams(top_p=1e-6, min_p=0.999, repetition_penalty=0.5, block_size=1, stop=("a",))


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
