"""Samplers that wait for a word before each cycle, to see what happens between cycles."""

import threading
import time

from decoding.samplers.plain import PlainSampler
from tests.support import tiny


class Gated:
    """A mixin for a sampler; `log` has the requests of each cycle."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.gate, self.log = threading.Semaphore(0), []

    def go(self, passes):
        """Let so many passes be made."""
        self.gate.release(passes)

    def wait(self, what):
        self.log.append(what)
        assert self.gate.acquire(timeout=60)

    def cycle(self, batch, params):
        self.wait([*batch.requests])
        return super().cycle(batch, params)

    def until(self, condition):
        """Wait until a condition holds."""
        deadline = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.01)


class GatedPlain(Gated, PlainSampler):
    """Plain decoding of a tiny model."""

    def __init__(self, vocabulary=12):
        super().__init__(tiny.causal_lm(vocabulary), tiny.tokenizer(vocabulary))
