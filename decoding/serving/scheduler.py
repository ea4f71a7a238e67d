"""The thread that decodes for all clients: those with equal sampling parameters as one batch."""

import copy
import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from transformers import PreTrainedTokenizerBase

from decoding.any_subset.infilling import Infiller
from decoding.engine.likelihood import TokenScore, token_scores
from decoding.engine.params import USUAL, Chunk, Result, SamplingParams, Stats
from decoding.engine.running import Running
from decoding.engine.sampler import Sampler
from decoding.serving.metrics import Counts

requests_log = logging.getLogger("parade.requests")  # a line for each request that has ended
Group = tuple[Sampler, SamplingParams]  # what decodes the requests of a batch, and what they share


class Full(Exception):
    """The error of a request for which the queue has no room."""


@dataclass(eq=False)
class Job:
    """A request of a client.

    Attributes:
        number: In the order in which they came.
        model: The name of the sampler that decodes it.
        prompt, params, seed: Its own; the prompt as `Sampler.encode` gives it.
        show: Called in the scheduler's thread with every chunk, or with an error.
        answers: Whether tokens are decoded; False: the prompt alone is scored.
        best: How many of the most probable tokens come with each token's score; None: no scores.
        scores: Of all tokens but the prompt's first, when the answer has ended.
        stats: The answer's, once it has begun; they grow with it.
        came, last: When it came, and when its last tokens did, by the monotonic clock.
        first: Seconds to its first token.
    """

    number: int
    model: str
    prompt: Any
    params: SamplingParams
    seed: int
    show: Callable[[Chunk | Exception], None]
    best: int | None = None
    answers: bool = True
    scores: list[TokenScore] | None = None
    stats: Stats = field(default_factory=Stats)
    came: float = field(default_factory=time.monotonic)
    first: float | None = None
    last: float | None = None


class Scheduler:
    """Decodes requests that come and go, in its own thread.

    Args:
        samplers: By the name of the model that a client asks for.
        at_once: The most requests that are decoded together.
        waiting: The most further requests that may wait.
        longest: The most tokens of a prompt and its answer together.
        prefill_tokens: The most prompt tokens that one pass prefills before the next cycle of the
            requests being decoded; None: any number.
    """

    def __init__(
        self,
        samplers: dict[str, Sampler],
        at_once: int,
        waiting: int,
        longest: int,
        prefill_tokens: int | None = None,
    ):
        self.samplers, self.at_once, self.most, self.longest = samplers, at_once, waiting, longest
        self.prefill_tokens = prefill_tokens
        self.counts = Counts()
        self._numbers, self._changed = count(), threading.Condition()
        self._waiting: deque[Job] = deque()
        self._jobs: dict[int, Job] = {}  # that are decoded
        self._groups: dict[Group, Running] = {}
        self._cancelled: set[int] = set()
        self._unscored: deque[tuple[Job, Chunk]] = deque()  # answers that have ended
        self._open = True
        self.loaded = time.time()  # when the samplers were, the last one that was replaced
        self._thread = threading.Thread(target=self._run, name="decoding", daemon=True)
        self._thread.start()

    @property
    def running(self) -> int:
        """Return how many requests are being decoded."""
        return len(self._jobs)

    @property
    def waiting(self) -> int:
        """Return how many requests wait."""
        return len(self._waiting)

    @property
    def slots(self) -> int:
        """Return how many tokens the requests that are being decoded have, prompts included."""
        return sum(len(job.prompt) + sum(job.stats.emitted) for job in [*self._jobs.values()])

    @property
    def cache_bytes(self) -> int:
        """Return the bytes of their keys and values, in all networks."""
        return sum(running.nbytes for running in [*self._groups.values()])

    def replace(self, model: str, sampler: Sampler) -> None:
        """Decode the requests that begin from now on with another sampler of the same target.

        Those that are being decoded end with the old one, which nothing here refers to then.
        Raises ValueError where requests that wait could not be decoded.
        """
        lost = [rule for rule in self.samplers[model].rules if rule not in sampler.rules]
        if lost:
            raise ValueError(f"it does not offer verify={lost[0]}, which requests may ask for")
        self.samplers[model], self.loaded = sampler, time.time()

    def prepared(
        self,
        model: str,
        prompt: str | list[int],
        params: SamplingParams,
        suffix: str | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        usual: int = USUAL,
    ) -> tuple[Any, SamplingParams]:
        """Return a prompt for `submit`, and its parameters (`Sampler.with_room`).

        An infilling model takes the suffix after the answer. The calling thread may have a
        `tokenizer` of its own, equal to the sampler's.
        """
        sampler, most = self.samplers[model], params.max_new_tokens
        if tokenizer is not None:
            sampler = copy.copy(sampler)
            sampler.tokenizer = tokenizer
        whole: Any = prompt
        sampler.check_params(params)
        if not isinstance(prompt, str):
            self._check_length(len(prompt), most if sampler.continues else 0)
        if suffix is not None:
            if not isinstance(sampler, Infiller):
                raise ValueError(
                    f"suffix is for models that fill holes, and {model} goes on from a prompt: "
                    "leave it out"
                )
            if (holes := most) is None:
                around = len(sampler.between(prompt, suffix, 0))
                holes = max(1, min(usual, min(self.longest, sampler.context or around) - around))
            whole = sampler.between(prompt, suffix, min(holes, self.longest))
        found = sampler.encode(whole, params)
        self._check_length(len(found), most if sampler.continues else found.holes)
        return found, sampler.with_room(found, params, usual, self.longest)

    def _check_length(self, tokens: int, most: int | None) -> None:
        if most is None and tokens >= self.longest:
            raise ValueError(
                f"the prompt has {tokens} tokens, no room for an answer in the {self.longest} of "
                "this server: shorten it"
            )
        if tokens + (most or 0) > self.longest:
            raise ValueError(
                f"the prompt has {tokens} tokens and max_tokens={most}, "
                f"together more than the {self.longest} of this server: shorten one of them"
            )

    def submit(self, jobs: list[tuple]) -> list[Job]:
        """Queue requests, given as `Job`'s fields after its number, all or none; raise Full."""
        with self._changed:
            if not self._open or self.waiting + self.running + len(jobs) > self.at_once + self.most:
                raise Full
            queued = [Job(next(self._numbers), *job) for job in jobs]
            self._waiting += queued
            self._changed.notify()
        return queued

    def cancel(self, job: Job) -> None:
        """Give up a request; nothing happens if it has ended."""
        with self._changed:
            if job in self._waiting:
                self._waiting.remove(job)
                self.counts.requests["cancelled"] += 1
                self._told(job, "cancelled")
            elif job.number in self._jobs:
                self._cancelled.add(job.number)
                self._changed.notify()

    def close(self, seconds: float | None = None) -> None:
        """Take no more requests; return when all taken ones have ended, or after some seconds."""
        with self._changed:
            self._open = False
            self._changed.notify()
        self._thread.join(seconds)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: not self._open or self._busy)
                if not self._busy:
                    return
            self._turn()

    def _turn(self) -> None:
        """Admit requests, run a cycle, and score an answer; between turns no sampler is held."""
        with self._changed:
            new = self._take()
        for key, jobs in new.items():
            self._guard(key, self._admit, jobs)
        self._cycle()
        if self._unscored:
            self._score(*self._unscored.popleft())

    @property
    def _busy(self) -> bool:
        return bool(self._waiting or self._jobs or self._unscored)

    def _cycle(self) -> None:
        """Drop cancelled requests, and run one cycle of all others."""
        self._drop_cancelled()
        for key in [*self._groups]:
            self._guard(key, self._step)

    def _take(self) -> dict[Group, list[Job]]:
        """Take waiting requests in their order while there is room, by group."""
        found: dict[Group, list[Job]] = {}
        while self._waiting and self.running < self.at_once:
            job = self._waiting.popleft()
            if not job.answers:
                nothing = Result("", [], "length", Stats())
                self._account(job, nothing)
                self._unscored.append((job, Chunk(job.number, "", [], nothing)))
                continue
            sampler = self.samplers[job.model]
            self.counts.queued.add(time.monotonic() - job.came)
            found.setdefault((sampler, sampler.shared(job.params)), []).append(job)
            self._jobs[job.number] = job
        return found

    def _admit(self, key: Group, jobs: list[Job]) -> None:
        if key not in self._groups:
            capacity = self.longest + key[0].margin(key[1])
            self._groups[key] = Running(*key, capacity, self.prefill_tokens)
        running = self._groups[key]
        # The caches of all groups together have as many rows as requests may be decoded.
        others = [running for other, running in self._groups.items() if other != key]
        if sum(r.rows for r in others) + len(running) + len(jobs) > self.at_once:
            for other in others:
                other.trim()
        rows = ((job.number, job.prompt, job.seed, job.params) for job in jobs)
        numbers, prompts, seeds, params = zip(*rows)
        running.admit(numbers, prompts, seeds, params, between=self._cycle)
        self._groups[key] = running  # all that were in it may have ended meanwhile

    def _step(self, key: Group) -> None:
        running = self._groups[key]
        for number, answer in running.answers.items():
            self._jobs[number].stats = answer.stats
        for chunk in running.step():
            job = self._jobs[chunk.request]
            self._timed(job, len(chunk.token_ids))
            if chunk.result is not None:
                self._account(self._jobs.pop(chunk.request), chunk.result)
                if job.best is not None:
                    self._unscored.append((job, chunk))
                    continue
            job.show(chunk)
        if not running:
            del self._groups[key]

    def _score(self, job: Job, last: Chunk) -> None:
        """Score an answer's tokens, and show its last chunk."""
        assert last.result is not None
        if job.best is None:
            job.show(last)
            return
        ids = job.prompt + last.result.token_ids
        try:
            target = self.samplers[job.model].target
            options = {"chunk": self.prefill_tokens or len(ids), "between": self._cycle}
            job.scores = token_scores(target, ids, job.best, **options)
        except Exception as error:
            job.show(error)
        else:
            job.show(last)

    def _guard(self, key: Group, do: Callable, *given) -> None:
        """Call a function; if it fails, end only the requests of this group."""
        try:
            do(key, *given)
        except Exception as error:
            numbers = {*(job.number for jobs in given for job in jobs)}
            if (running := self._groups.pop(key, None)) is not None:
                numbers |= {*running.answers}
                running.clear()
            for number in numbers & self._jobs.keys():
                self.counts.requests["failed"] += 1
                self._told(self._jobs[number], "failed")
                self._jobs.pop(number).show(error)

    def _drop_cancelled(self) -> None:
        """Drop cancelled requests; one whose prompt is being prefilled is dropped after that."""
        with self._changed:
            self._cancelled &= self._jobs.keys()
            numbers = {*self._cancelled}
        for key, running in [*self._groups.items()]:
            gone = numbers & running.answers.keys()
            running.leave(gone)
            for number in gone:
                self.counts.requests["cancelled"] += 1
                self._told(self._jobs.pop(number), "cancelled")
            if not running:
                del self._groups[key]

    def _account(self, job: Job, result: Result) -> None:
        self.counts.add(len(job.prompt), result)
        self._told(job, result.finish_reason, result)

    def _timed(self, job: Job, tokens: int) -> None:
        """Note when tokens of a request came."""
        now = time.monotonic()
        if job.last is None:
            self.counts.first.add(now - job.came)
            job.first = now - job.came
        elif tokens:
            self.counts.between.add((now - job.last) / tokens, tokens)
        job.last = now

    def _told(self, job: Job, ended: str, result: Result | None = None) -> None:
        """Log a request that has ended, as one line of JSON."""
        seconds = time.monotonic() - job.came
        self.counts.whole.add(seconds)
        if not requests_log.isEnabledFor(logging.INFO):
            return
        line = {"time": round(time.time(), 3), "request": job.number, "model": job.model}
        line |= {"ended": ended, "prompt_tokens": len(job.prompt), "seconds": round(seconds, 4)}
        if job.first is not None:
            line["first_token_seconds"] = round(job.first, 4)
        if result is not None:
            line["tokens"] = len(result.token_ids)
            line["acceptance_length"] = round(result.stats.acceptance_length, 3)
        requests_log.info(json.dumps(line))
