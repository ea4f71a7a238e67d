"""A client of a real (local) HTTP server that answers, and fails, as servers do."""

import math
import socket

import pytest

from data.text.tokenizer import train_tokenizer
from decoding.engine.detokenize import text_after
from decoding.engine.params import SamplingParams
from decoding.external.openai_client import OpenAIClient
from tests.support.openai_server import serving
from tests.support.tokenizers import llama2

TOKENIZER = train_tokenizer(["return value of the function"], 280)
EOS = TOKENIZER.eos_token_id
TEXT = TOKENIZER("return the value").input_ids
PARAMS = SamplingParams(max_new_tokens=8, temperature=0.7, seed=3)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    """The client's waits between retries, which grow from half a second, are none here."""
    monkeypatch.setattr("openai._constants.INITIAL_RETRY_DELAY", 0.0)
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.0)


def said(prompt, seed):
    """Of each prompt and seed another answer, ended or not."""
    return [*TEXT[: 1 + (prompt[0] + (seed or 0)) % 3], EOS] if prompt[0] % 2 else TEXT * 9


def test_answers_by_token_ids():
    with serving(TOKENIZER, said) as server:
        client = OpenAIClient(server.url, TOKENIZER, concurrency=2)
        prompts = [[i, 5] for i in range(6)]
        reply = client.generate(prompts, PARAMS, eos=[EOS], seeds=range(6), logprobs=2)
    assert client.model == "m"
    assert reply.token_ids == [said(p, i)[:8] for i, p in enumerate(prompts)]
    assert reply.finish_reasons == ["length", "eos"] * 3
    for ids, steps in zip(reply.token_ids, reply.top):
        assert [step[0] for step in steps] == [
            (t, math.log(0.5)) if t else (0, math.log(0.25)) for t in ids
        ]
        assert all(len(step) == 2 for step in steps)
    assert server.most <= 2
    asked = {r["prompt"][0]: r for r in server.requests}
    assert [asked[i]["seed"] for i in range(6)] == [*range(6)]
    assert asked[0]["temperature"] == 0.7
    assert asked[0]["stop_token_ids"] == [EOS]


@pytest.mark.parametrize("failures", [[500, 503, 429], ["cut", "hang up"], ["short"]])
def test_a_server_that_recovers_is_asked_again(failures):
    with serving(TOKENIZER, said, failures=failures) as server:
        client = OpenAIClient(server.url, TOKENIZER, retries=3)
        reply = client.generate([[1, 5], [2, 5]], PARAMS, eos=[EOS], logprobs=2)
    assert reply.token_ids == [said([1], 3)[:8], said([2], 3)[:8]]
    assert len(server.requests) == 2 + len(failures)


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        (500, "answered 500: "),
        (400, "answered 400: "),
        ("hang up", "cannot be reached"),
        ("short", "of wrong length, "),
    ],
)
def test_one_that_does_not_is_one_line(failure, message):
    with serving(TOKENIZER, said, failures=[failure] * 9) as server:
        client = OpenAIClient(server.url, TOKENIZER, retries=2)
        with pytest.raises(ValueError, match=message) as error:
            client.generate([[2, 5]], PARAMS, eos=[EOS])
    assert "\n" not in str(error.value)
    assert server.url in str(error.value)
    assert len(server.requests) == (1 if failure == 400 else 3)


def test_a_prompt_that_is_refused_is_set_aside_where_that_is_asked_for():
    prompts, told = [[1, 5], [2, 5], [3, 5]], []
    for failures in (["none", 400], ["none", 422], ["none", 401]):
        with serving(TOKENIZER, said, failures=failures) as server:
            client = OpenAIClient(server.url, TOKENIZER, concurrency=1)
            try:
                reply = client.generate(prompts, PARAMS, eos=[EOS], logprobs=2, set_aside=True)
            except ValueError as error:
                told.append(str(error))
                continue
        assert reply.token_ids == [said([1], 3)[:8], None, said([3], 3)[:8]]
        assert [len(top) for top in reply.top] == [len(ids or []) for ids in reply.token_ids]
        assert [*reply.refused] == [1]
        assert f"answered {failures[1]}" in reply.refused[1]
    assert ["refuses the key" in text for text in told] == [True]  # which is no prompt's fault


def test_text_only_is_tokenised_again_where_the_count_agrees():
    apart = [TOKENIZER(c).input_ids[0] for c in "return"]  # the same text in other tokens
    answers = {1: [*TEXT, EOS], 2: [*apart, EOS], 3: TEXT * 9}
    with serving(TOKENIZER, lambda prompt, seed: answers[prompt[0]], ids=False) as server:
        client = OpenAIClient(server.url, TOKENIZER)
        reply = client.generate([[1], [2], [3]], PARAMS, eos=[EOS])
        with pytest.raises(ValueError, match=r"collector\.top_k=2"):
            client.generate([[1]], PARAMS, eos=[EOS], logprobs=2)
    assert reply.token_ids[:2] == [[*TEXT, EOS], None]
    assert reply.token_ids[2] in ((TEXT * 9)[:8], None)


class Decoding:
    """A tokenizer that decodes token by token, or that stops where bytes are no character."""

    eos_token_id = EOS

    def __init__(self, stops):
        self.stops = stops

    def decode(self, ids):
        if self.stops:  # as vLLM 0.32.0, which waits for more bytes with the token before them
            return TOKENIZER.decode(ids).partition("\ufffd")[0][:-1]
        return "".join(TOKENIZER.decode([i]) for i in ids)


@pytest.mark.parametrize("stops", [True, False])
def test_bytes_that_are_no_character(stops):
    *cut, _ = TOKENIZER("\U0001f600").input_ids  # three bytes of four
    answers = {1: [*TEXT[:2], *cut, TEXT[0], EOS], 2: [*TEXT[:2], EOS]}
    with serving(Decoding(stops), lambda prompt, seed: answers[prompt[0]]) as server:
        client = OpenAIClient(server.url, TOKENIZER)
        assert client.generate([[1]], PARAMS, eos=[EOS]).token_ids == [answers[1]]
        if stops:  # of a whole text every character counts
            with pytest.raises(ValueError, match="has another tokenizer"):
                client.generate([[2]], PARAMS, eos=[EOS])
    # As many tokens as U+FFFD itself has, but others.
    with serving(TOKENIZER, lambda prompt, seed: answers[1], ids=False) as server:
        client = OpenAIClient(server.url, TOKENIZER)
        assert client.generate([[1]], PARAMS, eos=[EOS]).token_ids == [None]


def test_another_tokenizer_is_told():
    other = train_tokenizer(["def f(x): yield x"], 270)
    with serving(other, lambda prompt, seed: [*range(60, 68)]) as server:
        client = OpenAIClient(server.url, TOKENIZER)
        client.generate([[1]], PARAMS, eos=[EOS])  # single bytes are the same in both
    with serving(other, lambda prompt, seed: [*range(258, 266)]) as server:
        client = OpenAIClient(server.url, TOKENIZER)
        with pytest.raises(ValueError, match="has another tokenizer"):
            client.generate([[1]], PARAMS, eos=[EOS])


def test_a_key_and_a_model(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "right")
    with serving(TOKENIZER, said, key="right", models=("a", "b")) as server:
        assert OpenAIClient(server.url, TOKENIZER, model="b").model == "b"
        with pytest.raises(ValueError, match=r"serves \['a', 'b'\]: name one"):
            OpenAIClient(server.url, TOKENIZER)
        with pytest.raises(ValueError, match=r"does not serve 'c'. Choose from \['a', 'b'\]"):
            OpenAIClient(server.url, TOKENIZER, model="c")
        monkeypatch.setenv("OPENAI_API_KEY", "wrong")
        with pytest.raises(ValueError, match="refuses the key: set OPENAI_API_KEY"):
            OpenAIClient(server.url, TOKENIZER, model="b")


def test_a_server_of_another_model():
    with serving(TOKENIZER, said, models=("/models/Right",)) as server:
        assert OpenAIClient(server.url, TOKENIZER, target="org/right").model == "/models/Right"
        with pytest.raises(ValueError, match=r"serves '/models/Right', and the target is 'org/it'"):
            OpenAIClient(server.url, TOKENIZER, target="org/it")
        named = OpenAIClient(server.url, TOKENIZER, target="org/it", model="/models/Right")
        assert named.model == "/models/Right"
    roots = {"another-name": "/models/it"}
    with serving(TOKENIZER, said, models=roots) as server:
        assert OpenAIClient(server.url, TOKENIZER, target="org/it").model == "another-name"
        with pytest.raises(ValueError, match="serves 'another-name'"):
            OpenAIClient(server.url, TOKENIZER, target="org/right")


def test_nobody_there_and_bad_numbers():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
    with pytest.raises(ValueError, match=r"cannot be reached: ") as error:
        OpenAIClient(url, TOKENIZER, retries=1)
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="concurrency=0"):
        OpenAIClient(url, TOKENIZER, concurrency=0)


SPACED = llama2()


@pytest.mark.parametrize("answer", [" Paris and", "\n    return x", "is"])
def test_an_answer_goes_on_from_its_prompt(answer):
    """A server's text after a prompt, with a tokenizer that puts a space before every text."""
    client = object.__new__(OpenAIClient)
    client.tokenizer, client.url = SPACED, "x"
    prompt = SPACED("def f").input_ids
    ids = client._goes_on(prompt, answer)
    assert text_after(SPACED, prompt, ids) == answer
    client._check_text(prompt, ids, answer, [])
    client._check_text(prompt, ids, SPACED.decode(ids), [])  # of a server that decodes it alone
    with pytest.raises(ValueError, match="another tokenizer"):
        client._check_text(prompt, ids, answer + "x", [])
    if answer != " Paris and":
        alone = SPACED(answer, add_special_tokens=False).input_ids  # as it was
        assert text_after(SPACED, prompt, alone) != answer
