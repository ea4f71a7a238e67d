"""What a request leaves behind in the server, and what one that takes too long does."""

import gc
import json
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
from starlette.testclient import TestClient

from decoding.samplers.plain import PlainSampler
from decoding.serving.app import Answers, Server
from decoding.serving.scheduler import Scheduler
from tests.support import tiny
from tests.support.gated import GatedPlain

V = 12


def answers_left(monkeypatch, seconds):
    """How many answers are still in memory after so many seconds at the most."""
    made, init = [], Answers.__init__

    def watched(self, *given):
        made.append(weakref.ref(self))
        init(self, *given)

    monkeypatch.setattr(Answers, "__init__", watched)
    sampler = PlainSampler(tiny.causal_lm(V), tiny.tokenizer(V))
    scheduler = Scheduler({"m": sampler}, at_once=3, waiting=2, longest=32)
    server = Server(scheduler, sampler.tokenizer, key=None, most=10_000, seconds=20.0)
    gc.collect()
    gc.disable()
    try:
        with TestClient(server.app()) as client:
            for stream in (False, True):
                asked = {"model": "m", "prompt": "abc", "max_tokens": 3, "stream": stream}
                assert client.post("/v1/completions", json=asked).status_code == 200
            ends = time.monotonic() + seconds
            while (left := sum(ref() is not None for ref in made)) and time.monotonic() < ends:
                time.sleep(0.01)
    finally:
        gc.enable()
    assert len(made) == 2
    return left


def test_what_has_been_answered_is_freed_at_once(monkeypatch):
    """By reference count: a full collection comes only after many requests."""
    assert answers_left(monkeypatch, seconds=20) == 0


@pytest.mark.parametrize("wrong", ["itself", "the task's error"])
def test_a_cycle_of_references_fails_the_same_test(monkeypatch, wrong):
    async def until_hung_up(self):
        if wrong == "itself":
            self.again = self
        while (await self.request.receive())["type"] != "http.disconnect":
            pass

    monkeypatch.setattr(Answers, "_until_hung_up", until_hung_up)
    assert answers_left(monkeypatch, seconds=1) > 0


def late(stream):
    """What clients get of a server with one place, where nothing is decoded in time.

    Returns:
        ([(status, error) of one that has the place and of one that waits for it], the status of one
        that comes after them, when so many cycles are made as it needs, how the requests ended)
    """
    sampler = GatedPlain()
    scheduler = Scheduler({"m": sampler}, at_once=1, waiting=1, longest=32)
    server = Server(scheduler, sampler.tokenizer, key=None, most=10_000, seconds=0.3)

    def ask(tokens):
        body = {"prompt": "abc", "max_tokens": tokens, "ignore_eos": True, "stream": stream}
        reply = client.post("/v1/completions", json=body)
        first = reply.text.split("\n\n")[0].removeprefix("data: ")
        return reply.status_code, json.loads(first).get("error")

    with TestClient(server.app()) as client, ThreadPoolExecutor(2) as pool:
        try:
            both = [*pool.map(ask, (16, 16))]
            sampler.go(1 + 4)  # the cycle that had begun, and four of the third request
            server.seconds = 60.0
            third, _ = ask(4)
            ended = {**scheduler.counts.requests}
        finally:
            sampler.go(100)
    return both, third, ended


@pytest.mark.parametrize("stream", [False, True])
def test_what_takes_too_long_gets_504_and_frees_its_place(stream):
    both, third, ended = late(stream)
    for status, error in both:
        assert status == (200 if stream else 504)  # a stream has begun with its status
        assert (error["code"], error["type"]) == (504, "timeout_error")
        assert error["message"] == "not ended within 0.3 seconds"
    assert third == 200
    assert ended == {"cancelled": 2, "length": 1}


def test_a_place_that_is_not_given_up_fails_the_same_test(monkeypatch):
    monkeypatch.setattr(Answers, "give_up", lambda self: self.watch.cancel())
    both, third, ended = late(stream=False)
    assert [status for status, _ in both] == [504, 504]
    assert (third, ended) == (429, {})
