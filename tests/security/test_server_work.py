"""Work comes after its checks: what a server refuses costs it little, and keeps nobody waiting."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from starlette.testclient import TestClient

from data.text import rendering
from decoding.samplers.plain import PlainSampler
from decoding.serving import app, protocol
from decoding.serving.app import Server
from decoding.serving.chats import Chat
from decoding.serving.scheduler import Scheduler
from tests.support import tiny

pytestmark = pytest.mark.processes

V, PATH = 12, "/home/somebody/secret/export"
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
FINE = {"prompt": "abc", "max_tokens": 2}


class Texts:
    """Record the texts that a server's tokenizers encode."""

    def __init__(self):
        self.texts, self.wait = [], lambda text: None


@pytest.fixture
def encoded(monkeypatch):
    """The texts that tokenizers of the server encode."""
    found, call = Texts(), tiny.tokenizer(V).__class__.__call__

    def watched(self, text, *given, **options):
        found.texts.append(text)
        found.wait(text)
        return call(self, text, *given, **options)

    monkeypatch.setattr(tiny.tokenizer(V).__class__, "__call__", watched)
    return found


@pytest.fixture
def server():
    sampler = PlainSampler(tiny.causal_lm(V), tiny.tokenizer(V))
    sampler.tokenizer.name_or_path = PATH
    sampler.tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    scheduler = Scheduler({"m": sampler}, at_once=3, waiting=2, longest=32)
    return Server(scheduler, sampler.tokenizer, key=None, most=4_000_000, seconds=20.0)


@pytest.fixture
def client(server):
    with TestClient(server.app(), raise_server_exceptions=False) as client:
        yield client


def asked(body):
    return body if isinstance(body, str | bytes) else json.dumps(body, separators=(",", ":"))


DEEP = "[" * 900 + "]" * 900
BAD = [
    ({"prompt": [""] * 100_000, "n": 64}, "6400000 answers are asked for"),
    ({"prompt": [[1]] * 100_000}, "100000 answers are asked for"),
    ({"prompt": "abc", "n": 6}, "6 answers are asked for"),
    ({"prompt": "abc", "n": 10**9}, "an integer from 1 to 64"),
    ({"prompt": "a" * 3_900_000}, "3900000 characters"),
    ({"prompt": " " * 3_900_000}, "3900000 characters"),
    ({"prompt": ["a", "b" * 2049]}, "2049 characters"),
    ({"prompt": [1] * 1_900_000}, "1900000 tokens, no room for an answer in the 32"),
    ({"prompt": [1.5] * 900_000}, "it must be a text, token ids"),
    ({"prompt": [{}] * 900_000}, "it must be a text, token ids"),
    ({"prompt": [["a"]] * 600_000}, "it must be a text, token ids"),
    ({"prompt": "a", "stop": ["a"] * 100_000}, "a list of at most 16"),
    ({"prompt": "a", "stop": ["a" * 1001]}, "a text of at most 1000 characters"),
    ({"prompt": "a", "suffix": "a" * 100_000}, "100000 characters"),
    ({f"k{i}": 0 for i in range(300_000)}, "unknown field 'k0'"),
    ('{"prompt": "a", "max_tokens": %s}' % ("9" * 5000), "the body is no JSON: Exceeds"),
    ('{"prompt": "a", "max_tokens": %s}' % ("9" * 4000), "an integer of 64 bits"),
    ('{"prompt": "a", "seed": %s}' % ("9" * 4000), "an integer of 64 bits"),
    ('{"prompt": "a", "temperature": %s}' % ("9" * 4000), "a number of at most"),
    ('{"prompt": "a", "top_p": 1e999}', "a number of at most"),
    ('{"prompt": [%s]}' % ("9" * 4000), "it must be a text, token ids"),
    (f'{{"prompt": {DEEP}}}', "it must be a text, token ids"),
    (f'{{"prompt": "a", "suffix": {DEEP}}}', "it must be a text"),
    (f'{{"prompt": "a", "tools": {DEEP}}}', "is not offered"),
    ('{"prompt": "a", "%s": 1}' % ("k" * 1_000_000), "unknown field 'kkk"),
    ("[" * 100_000, "no JSON"),
    ('{"prompt": "\\udc00"}', "surrogates not allowed"),
    ('{"prompt": "a"}'.encode("utf-16"), "no JSON"),
]


@pytest.mark.parametrize(("body", "message"), BAD, ids=range(len(BAD)))
def test_what_is_refused_is_not_encoded(client, encoded, body, message):
    encoded.texts.clear()
    begun = time.process_time()  # of the server's thread, too
    reply = client.post(COMPLETIONS, content=asked(body))
    assert time.process_time() - begun < 5
    error = reply.json()["error"]
    assert reply.status_code == 400
    assert message in error["message"]
    assert "\n" not in error["message"]
    assert len(error["message"]) < 500
    assert len(encoded.texts) == 0
    assert client.post(COMPLETIONS, json=FINE).status_code == 200


def messages(content, **more):
    return {"messages": [{"role": "user", "content": content, **more}], "max_tokens": 2}


BAD_CHATS = [
    (messages("a" * 3_900_000), "3900000 characters"),
    (messages([{"type": "text", "text": "a" * 5000}] * 2), "10000 characters"),
    (messages([{"type": "image"}] * 100_000), "parts of type text"),
    ({"messages": [{}] * 900_000}, "a list of {role, content}"),
    (messages(""), "the prompt is empty"),
    (f'{{"messages": [{{"role": "user", "content": "a", "more": {DEEP}}}]}}', "RecursionError"),
]


@pytest.mark.parametrize(("body", "message"), BAD_CHATS, ids=range(len(BAD_CHATS)))
def test_chats_likewise(client, encoded, body, message):
    encoded.texts.clear()
    reply = client.post(CHATS, content=asked(body))
    assert reply.status_code == 400
    assert message in reply.json()["error"]["message"]
    assert not any(encoded.texts)
    assert client.post(CHATS, json=messages("abc")).status_code == 200


def test_a_text_is_encoded_once_for_all_its_answers(client, encoded):
    encoded.texts.clear()
    reply = client.post(COMPLETIONS, json={**FINE, "n": 5})
    assert len(reply.json()["choices"]) == 5
    assert encoded.texts.count("abc") == 1


def test_a_long_text_that_may_fit_is_encoded(client, encoded):
    """The bound is of what cannot fit: these characters are one token."""
    encoded.texts.clear()
    reply = client.post(COMPLETIONS, json={**FINE, "prompt": " " * 2048 + "a"})
    assert "2049 characters" in reply.json()["error"]["message"]
    assert client.post(COMPLETIONS, json={**FINE, "prompt": "a" * 10}).status_code == 200
    assert encoded.texts.count("a" * 10) == 1
    assert " " * 2048 + "a" not in encoded.texts


def kept_waiting(server, client, encoded, path, slow):
    """Seconds of an ordinary completion while others' requests take long to read."""
    free = threading.Event()
    encoded.wait = lambda text: free.wait(20) if len(text) > 10 else None
    try:
        with ThreadPoolExecutor(4) as pool:
            others = [pool.submit(client.post, path, json=slow) for _ in range(4)]
            time.sleep(0.3)
            begun = time.monotonic()
            assert client.post(COMPLETIONS, json=FINE).status_code == 200
            seconds = time.monotonic() - begun
            free.set()
            assert {other.result().status_code for other in others} == {400}
    finally:
        free.set()
    return seconds


LONG = {"prompt": ["a" * 2000] * 5, "user": "u" * app.LARGE}


def test_large_requests_keep_small_ones_not_waiting(server, client, encoded):
    assert kept_waiting(server, client, encoded, COMPLETIONS, LONG) < 5


def test_chats_keep_completions_not_waiting(server, client, monkeypatch, encoded):
    monkeypatch.setattr(rendering, "SECONDS", 2)
    endless = "{% for a in range(99999) %}" * 4 + "{% endfor %}" * 4
    for _, tokenizer, _ in server._lanes.values():
        tokenizer.chat_template = endless
    slow = messages("a")
    assert kept_waiting(server, client, encoded, CHATS, slow) < 1.5


def test_one_lane_for_all_fails_the_same_test(server, client, monkeypatch, encoded):
    one = server._lanes[protocol.Completion, False]
    monkeypatch.setattr(server, "_lanes", dict.fromkeys(server._lanes, one))
    monkeypatch.setattr(server, "seconds", 1.0)
    with pytest.raises(AssertionError, match="504"):
        kept_waiting(server, client, encoded, COMPLETIONS, LONG)


def test_the_request_s_time_includes_its_reading(server, client, encoded):
    server.seconds, free = 0.3, threading.Event()
    encoded.wait = lambda text: free.wait(20)
    try:
        reply = client.post(COMPLETIONS, json=FINE)
    finally:
        free.set()
    assert reply.status_code == 504


def test_errors_name_no_file(server, client, monkeypatch, caplog):
    server._lanes[Chat, False][1].chat_template = "{{ raise_exception('no') }}"
    said = client.post(CHATS, json=messages("abc")).json()["error"]["message"]
    assert "'m' rejected a chat: no" in said

    def failed(*_):
        raise OSError(f"cannot read {PATH}")

    monkeypatch.setattr(PlainSampler, "cycle", failed)
    decoded = client.post(COMPLETIONS, json=FINE)
    streamed = client.post(COMPLETIONS, json={**FINE, "stream": True})
    monkeypatch.setattr(PlainSampler, "encode", failed)
    read = client.post(COMPLETIONS, json=FINE)
    for reply in (decoded, streamed, read):
        assert "error" in reply.text
        assert "somebody" not in reply.text
    assert (decoded.status_code, read.status_code) == (500, 500)
    assert PATH in caplog.text  # who runs the server reads it


def test_a_panic_of_a_library_is_an_answer(client, monkeypatch):
    class Panic(BaseException):
        pass

    def panic(*_):
        raise Panic(PATH)

    monkeypatch.setattr(PlainSampler, "encode", panic)
    reply = client.post(COMPLETIONS, json=FINE)
    assert (reply.status_code, "somebody" in reply.text) == (500, False)
