"""Continuous batching: requests that join a batch, get their tokens cycle by cycle, and leave it.

A request's text depends on its own seed alone, and on neither when it came nor who else is there:
no row of a pass attends to another, and draws are counted from when the row came.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from decoding.engine.batch import Batch
from decoding.engine.detokenize import Detokenizer
from decoding.engine.params import Chunk, SamplingParams, Stats
from decoding.engine.randomness import KeyedRandomness, Randomness

if TYPE_CHECKING:
    from decoding.engine.sampler import Sampler


@dataclass
class Answer:
    """One request's answer so far, on the host. prompt: what `Sampler.encode` made of its own."""

    prompt: Any
    params: SamplingParams
    token_ids: list[int]
    stats: Stats
    text: Detokenizer
    printed: int = 0  # characters already streamed
    sent: int = 0  # tokens already streamed


class Running:
    """Requests that are decoded together.

    Args:
        sampler: What decodes them.
        params: How; of each request's own parameters those are read that end its answer
            (`Sampler.shared`).
        capacity: Slots of a row of the caches, for the longest request that may come
            (`Sampler.capacity`).
    """

    def __init__(self, sampler: "Sampler", params: SamplingParams, capacity: int):
        self.sampler, self.params, self.capacity = sampler, params, capacity
        self.lossy = sampler.lossy(params)
        self.answers: dict[int, Answer] = {}
        self.batch: Batch | None = None
        self._seconds = 0.0
        self._before: dict[int, tuple[dict[str, int], dict[str, float], float]] = {}

    def __len__(self) -> int:
        return len(self.answers)

    @property
    def rows(self) -> int:
        """Rows of its caches, those of requests that have left included."""
        networks = {} if self.batch is None else self.batch.networks
        return max((network.cache.allocated for network in networks.values()), default=0)

    def trim(self) -> None:
        """Give back the memory of requests that have left."""
        if self.batch is not None and self.rows > len(self):
            for network in self.batch.networks.values():
                network.cache.trim(len(self))

    def admit(
        self,
        requests: Sequence[int],
        prompts: Sequence[Any],
        seeds: Sequence[int],
        params: Sequence[SamplingParams] | None = None,
        randomness: Randomness | None = None,
    ) -> None:
        """Prefill new requests, as one pass, and let them join those that are running.

        Args:
            requests: Their numbers, which nobody else here has.
            prompts: What `Sampler.encode` made of their prompts.
            seeds: One each.
            params: Their own; None: those of all.
            randomness: Replaces the keyed randomness, in tests, of a batch that nobody joins.
        """
        started, sampler = time.perf_counter(), self.sampler
        before = self._spent()
        with torch.inference_mode():
            randomness = randomness or KeyedRandomness([*seeds], sampler.device)
            fresh = sampler.new_batch(prompts, self.params, randomness, self.capacity)
            fresh.requests = [*requests]
            sampler.begin(fresh, self.params)
            if self.answers:
                self.batch.join(fresh)
            else:
                self.batch, before = fresh, dict.fromkeys(fresh.networks, 0.0)
        passes = {name: n.passes for name, n in self.batch.networks.items()}
        for request, prompt, own in zip(requests, prompts, params or [self.params] * len(prompts)):
            stats, text = Stats(lossy=self.lossy), Detokenizer(sampler.tokenizer)
            self.answers[request] = Answer(prompt, own, [], stats, text)
            self._before[request] = passes, before, self._seconds
        self._seconds += time.perf_counter() - started

    def step(self, text: bool = True) -> list[Chunk]:
        """One cycle of all requests; what each has to show. Finished ones leave.

        Args:
            text: False shows finished requests only, and detokenises nothing on the way.
        """
        started, batch = time.perf_counter(), self.batch
        with torch.inference_mode():
            tokens, counts = self.sampler.cycle(batch, self.params)
            batch.append(tokens, counts)
            emitted = zip(tokens.tolist(), counts.tolist())
        chunks = []
        for request, (new, count) in zip(batch.requests, emitted):
            answer = self.answers[request]
            answer.stats.drafted += batch.drafted
            chunk = self.sampler.commit(request, answer, new[:count], text)
            if chunk is not None:
                chunks.append(chunk)
        self._seconds += time.perf_counter() - started
        finished = [chunk.request for chunk in chunks if chunk.result is not None]
        for request in finished:
            self._account(request)
        self.leave(finished)
        return chunks

    def leave(self, requests: Iterable[int]) -> None:
        """Drop requests, finished or not."""
        gone = {*requests}
        if not gone:
            return
        for request in gone:
            self.answers.pop(request)
            self._before.pop(request)
        # The last rows come to where one is free: the others' caches stay where they are.
        rows = [b for b, request in enumerate(self.batch.requests) if request not in gone]
        if not rows:
            self.batch = None
            return
        stay = [b for b in rows if b < len(rows)]
        come = [b for b in rows if b >= len(rows)]
        keep = [b if b in stay else come.pop() for b in range(len(rows))]
        with torch.inference_mode():
            self.batch.select(keep)

    def _spent(self) -> dict[str, float]:
        """Seconds in the forwards of each network so far."""
        return {} if self.batch is None else {n: x.seconds for n, x in self.batch.networks.items()}

    def _account(self, request: int) -> None:
        """Fill in the passes and the split of the seconds when a request ends."""
        stats = self.answers[request].stats
        passes, spent, began = self._before[request]
        networks = self.batch.networks
        taken = {name: n.passes - passes[name] for name, n in networks.items()}
        seconds = {name: n.seconds - spent[name] for name, n in networks.items()}
        stats.target_passes, stats.drafter_passes = taken["target"], taken.get("drafter", 0)
        stats.target_s, stats.drafter_s = seconds["target"], seconds.get("drafter", 0.0)
        stats.sampler_s = self._seconds - began - stats.target_s - stats.drafter_s
