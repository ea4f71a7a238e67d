"""What a request leaves behind in the server."""

import gc
import time
import weakref

import pytest
from starlette.testclient import TestClient

from decoding.samplers.plain import PlainSampler
from decoding.serving.app import Answers, Server
from decoding.serving.scheduler import Scheduler
from tests.support import tiny

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
