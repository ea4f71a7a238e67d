"""A model's generation_config.json gives a request its defaults, or is refused in one line."""

import json

import pytest
from starlette.testclient import TestClient
from transformers import GenerationConfig

from decoding import generate
from decoding.engine.defaults import NOT_HAD, model_defaults
from decoding.engine.params import SamplingParams
from decoding.samplers.jacobi import JacobiSampler
from decoding.samplers.plain import PlainSampler
from decoding.serving.app import Server
from decoding.serving.scheduler import Scheduler
from tests.support import tiny
from tests.support.refused import refused

V = 24
OWN = {"temperature": 0.6, "top_k": 3, "repetition_penalty": 1.5}


def sampler(kind=PlainSampler, **named):
    """A sampler of a model whose generation_config.json names these values."""
    model = tiny.causal_lm(V).float()
    model.generation_config = GenerationConfig.from_dict(named)
    more = {"block_size": 4} if kind is JacobiSampler else {}
    return kind(model, tiny.tokenizer(V), **more)


def test_what_a_model_names_is_read_and_nothing_else():
    assert model_defaults(sampler()) == {}
    every = OWN | {"top_p": 0.9, "min_p": 0.1}
    assert model_defaults(sampler(**every, do_sample=True, max_length=20, num_beams=1)) == every
    assert model_defaults(sampler(temperature=0.0)) == {"temperature": 0.0}
    neutral = {"num_beams": 1, "typical_p": 1.0, "no_repeat_ngram_size": 0, "guidance_scale": 1}
    idle = {"suppress_tokens": [], "forced_eos_token_id": None, "token_healing": False}
    assert {*neutral, *idle} < NOT_HAD.keys()
    assert model_defaults(sampler(**neutral, **idle)) == {}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("no_repeat_ngram_size", 2), ("no_repeat_ngram_size", 1), ("encoder_repetition_penalty", 2),
        ("suppress_tokens", [3]), ("bad_words_ids", [[3]]), ("num_beams", 4), ("typical_p", 0.5),
        ("min_new_tokens", 1), ("forced_eos_token_id", 0), ("stop_strings", ["a"]),
        ("guidance_scale", 2.0), ("penalty_alpha", 0.6), ("sequence_bias", [[[1], 2.0]]),
        ("temperature", -1.0), ("top_p", 2.0), ("top_k", "many"), ("repetition_penalty", 0.0),
    ],
)  # fmt: skip
def test_what_no_sampler_has_is_one_line(key, value):
    found = sampler()
    setattr(found.target.generation_config, key, value)
    line = refused(model_defaults, found)
    assert f"{key}=" in line
    assert "generation_config=ignore" in line


@pytest.fixture
def asked(monkeypatch, capfd):
    """Runs decoding.generate with a model that names these values."""

    def ask(named, *words):
        monkeypatch.setattr(generate, "load", lambda *a, **k: sampler(**named))
        generate.run(["model=m", "prompt=abc", "max_new_tokens=12", "seed=5", *words])
        out, err = capfd.readouterr()
        return out.split("\n\n")[0], err

    return ask


def text_of(**params):
    given = SamplingParams(max_new_tokens=12, seed=5, **params)
    return "abc" + sampler().generate(["abc"], given)[0].text


def test_generate_takes_them_where_the_user_names_none(asked):
    text, told = asked(OWN)
    assert text == text_of(**OWN) != text_of()
    assert "temperature=0.6, top_k=3, repetition_penalty=1.5" in told
    # A value that is given holds, also one that is the neutral default.
    text, told = asked(OWN, "temperature=0", "repetition_penalty=1")
    assert text == text_of(temperature=0)
    assert "temperature" not in told
    text, told = asked(OWN, "generation_config=ignore")
    assert (text, told) == (text_of(), "")
    assert asked({}) == (text_of(), "")


def test_generate_refuses_what_it_has_not(asked):
    with pytest.raises(ValueError, match="no_repeat_ngram_size=2"):
        asked({"no_repeat_ngram_size": 2})
    assert asked({"no_repeat_ngram_size": 2}, "generation_config=ignore")[0] == text_of()


def answers(defaults, **fields):
    """The texts of a drafter and of plain decoding for one request to a server."""
    samplers = {"m": sampler(JacobiSampler), "plain": sampler()}
    scheduler = Scheduler(samplers, at_once=2, waiting=4, longest=48)
    limits = {"key": None, "most": 10_000, "seconds": 60.0, "defaults": defaults}
    server = Server(scheduler, samplers["plain"].tokenizer, **limits)
    body = {"prompt": "abc", "max_tokens": 12, "seed": 5, **fields}
    with TestClient(server.app(), raise_server_exceptions=False) as http:
        found = [http.post("/v1/completions", content=json.dumps(body | {"model": model}))
                 for model in samplers]  # fmt: skip
    return [reply.json()["choices"][0]["text"] for reply in found]


def test_a_server_takes_them_for_fields_that_a_request_leaves_out():
    own = answers({}, **OWN)
    assert own[0] == own[1]
    assert answers(OWN) == own != answers({})
    assert answers(OWN, temperature=None) == own  # null is left out
    neutral = {"temperature": 1.0, "top_k": -1, "repetition_penalty": 1.0}
    assert answers(OWN, **neutral) == answers({})
