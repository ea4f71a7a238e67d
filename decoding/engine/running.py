"""Continuous batching: requests join a batch, get their tokens cycle by cycle, and leave it.

A request's text depends on its own seed alone: no row of a pass attends to another, and draws are
counted from when the row came.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from decoding.engine.answer import Answer
from decoding.engine.batch import Batch
from decoding.engine.cache import Rows
from decoding.engine.grammar import Constraint
from decoding.engine.grouping import FEW_PASSES, PASS_COSTS, prefill_groups
from decoding.engine.params import Chunk, SamplingParams
from decoding.engine.randomness import KeyedRandomness, Randomness


class Cycles(Protocol):
    """The part of a `Sampler` that a running batch calls."""

    device: torch.device
    tokenizer: PreTrainedTokenizerBase
    starts_alone: bool
    continues: bool

    def lossy_reason(self, params: SamplingParams) -> str:
        """Name the option that changes the distribution, '' if none."""

    def new_batch(
        self, prompts: list, params: SamplingParams, randomness: Randomness, capacity: int
    ) -> Batch:
        """Make a batch of requests that have not begun."""

    def constraint(self, prompt: Any, params: SamplingParams) -> Constraint | None:
        """Make the constraint of an answer."""

    def known_tokens(self, prompt: Any) -> int:
        """Return how many of a prompt's first tokens need not be read again."""

    def ended(self, batch: Batch, rows: Sequence[int]) -> None:
        """Keep what later requests can use of rows that end."""

    def begin(self, batch: Batch, params: SamplingParams) -> None:
        """Prefill a batch."""

    def cycle(self, batch: Batch, params: SamplingParams) -> tuple[Tensor, Tensor]:
        """Run one target pass: tokens [B, m], and how many of each row are emitted."""

    def commit(self, answer: Answer, new: list[int], text: bool) -> Chunk | None:
        """Add a cycle's tokens to one answer."""


class Emitted(NamedTuple):
    """A request's new tokens of a cycle, and how many drafts the pass verified."""

    request: int
    tokens: list[int]
    drafted: int


class Running:
    """Requests that are decoded together.

    Args:
        params: The shared parameters (`Sampler.shared`).
        capacity: Cache slots of a row, for the longest request that may come (`Sampler.capacity`).
        prefill_tokens: The most tokens that one pass prefills; longer prompts take several. None:
            any number.
    """

    def __init__(
        self,
        sampler: Cycles,
        params: SamplingParams,
        capacity: int,
        prefill_tokens: int | None = None,
    ):
        self.sampler, self.params, self.capacity = sampler, params, capacity
        self.prefill_tokens = prefill_tokens
        self.lossy_reason = sampler.lossy_reason(params)
        self.answers: dict[int, Answer] = {}
        self.batch: Batch | None = None
        self._seconds = 0.0
        self._before: dict[int, tuple[dict[str, int], dict[str, float], float]] = {}
        self._first: list[Emitted] = []  # of cycles that no step has shown yet

    def __len__(self) -> int:
        return len(self.answers)

    @property
    def rows(self) -> int:
        """Return the rows of its caches, with those of requests that have left."""
        return max((cache.allocated for cache in self._caches()), default=0)

    @property
    def nbytes(self) -> int:
        """Return the bytes of its caches; another thread may ask."""
        return sum(cache.nbytes for cache in self._caches())

    def trim(self) -> None:
        """Free the memory of requests that have left."""
        if self.rows > len(self):
            for cache in self._caches():
                cache.trim(len(self))

    def _caches(self) -> list[Rows]:
        batch = self.batch
        networks = [] if batch is None else [*batch.networks.values()]
        return [network.cache for network in networks if network.cache is not None]

    def admit(
        self,
        requests: Sequence[int],
        prompts: Sequence[Any],
        seeds: Sequence[int],
        params: Sequence[SamplingParams] | None = None,
        randomness: Randomness | None = None,
        between: Callable[[], None] = lambda: None,
    ) -> None:
        """Prefill new requests in `prefill_groups`, and let them join those that are running.

        A prompt longer than a pass comes by itself, so where it is cut depends on its own length
        alone. If the sampler `starts_alone`, they have their first cycle here, and the next `step`
        shows it.

        Args:
            requests: Their numbers, which no running request has.
            prompts, seeds: A prompt as `Sampler.encode` made it, and a seed, for each.
            params: Their own; None: the shared ones.
            randomness: Replaces the keyed randomness, in tests, of a batch that nobody joins.
            between: Called after each prefill pass; it may `step`, so that others do not wait.
        """
        params = params or [self.params] * len(prompts)
        groups, longest = [[*range(len(prompts))]], 0
        if randomness is None:  # else it is of all of them
            cost = PASS_COSTS.get(self.sampler.device.type, FEW_PASSES)
            known = [*map(self.sampler.known_tokens, prompts)]
            groups = [[n] for n, count in enumerate(known) if count]  # each goes on from its own
            others = [n for n, count in enumerate(known) if not count]
            sizes = [len(prompts[n]) for n in others]
            longest = max(sizes, default=0)
            found = prefill_groups(sizes, cost, self.prefill_tokens)
            groups += [[others[i] for i in group] for group in found]
        for group in groups:
            rows = ((requests[n], prompts[n], seeds[n], params[n]) for n in group)
            numbers, texts, keys, own = zip(*rows)
            expected = 0 if self.answers else len(prompts), longest
            self._enter(numbers, texts, keys, own, randomness, between, expected)

    def _enter(
        self,
        requests: Sequence[int],
        prompts: Sequence[Any],
        seeds: Sequence[int],
        params: Sequence[SamplingParams],
        randomness: Randomness | None,
        between: Callable[[], None],
        expected: tuple[int, int],
    ) -> None:
        """Prefill requests together, and let them join; others may follow (`Batch.expected`)."""
        started, sampler, paused = time.perf_counter(), self.sampler, 0.0

        def pause() -> None:
            nonlocal paused
            paused -= time.perf_counter()
            between()
            paused += time.perf_counter()

        with torch.inference_mode():
            randomness = randomness or KeyedRandomness([*seeds], sampler.device)
            fresh = sampler.new_batch([*prompts], self.params, randomness, self.capacity)
            fresh.requests = [*requests]
            fresh.constraints = [sampler.constraint(p, own) for p, own in zip(prompts, params)]
            # Several together fit into one pass, so nobody's prompt is cut because of others.
            fresh.chunk = self.prefill_tokens if len(prompts) == 1 else None
            fresh.between, fresh.expected = pause, expected
            sampler.begin(fresh, self.params)
            prefilled = {name: n.passes for name, n in fresh.networks.items()}
            first = []
            if sampler.starts_alone:
                first = self._cycle(fresh)
                pause()
            taken = {name: n.passes - prefilled[name] for name, n in fresh.networks.items()}
            before = self._spent()
            if self.batch is not None:
                self.batch.join(fresh)
            else:
                self.batch, before = fresh, dict.fromkeys(fresh.networks, 0.0)
        passes = {name: n.passes - taken[name] for name, n in self.batch.networks.items()}
        shared = sampler.tokenizer, self.lossy_reason
        for request, prompt, own in zip(requests, prompts, params):
            context = prompt if sampler.continues else ()
            answer = Answer(request, prompt, own, *shared, context)
            answer.stats.reused, self.answers[request] = fresh.reused, answer
            self._before[request] = passes, before, self._seconds
        self._first += first
        self._seconds += time.perf_counter() - started - paused

    def step(self, text: bool = True) -> list[Chunk]:
        """Run one cycle of all requests; return the chunks of it, and of requests' first cycles.

        `text` False returns finished requests only, and detokenises nothing before.
        """
        first, self._first = self._first, []
        chunks = self._shown(first, text)
        if self.batch is not None:
            started = time.perf_counter()
            with torch.inference_mode():
                emitted = self._cycle(self.batch)
            self._seconds += time.perf_counter() - started
            chunks += self._shown(emitted, text)
        return chunks

    def _cycle(self, batch: Batch) -> list[Emitted]:
        """Run one cycle of a batch, and commit its tokens."""
        tokens, counts = self.sampler.cycle(batch, self.params)
        batch.append(tokens, counts)
        drafted = batch.drafted
        if not isinstance(drafted, Tensor):
            drafted = counts.new_tensor(drafted).expand_as(counts)
        rows = zip(batch.requests, tokens.tolist(), counts.tolist(), drafted.tolist())
        return [Emitted(request, new[:count], drafts) for request, new, count, drafts in rows]

    def _shown(self, emitted: list[Emitted], text: bool) -> list[Chunk]:
        """Return the chunks of requests' new tokens; finished requests leave."""
        started, chunks = time.perf_counter(), []
        for request, new, drafted in emitted:
            answer = self.answers[request]
            answer.stats.drafted += drafted
            chunk = self.sampler.commit(answer, new, text)
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
        if not gone or self.batch is None:
            return
        ends = [b for b, request in enumerate(self.batch.requests) if request in gone]
        self.sampler.ended(self.batch, ends)
        for request in gone:
            self.answers.pop(request)
            self._before.pop(request)
        self._first = [e for e in self._first if e.request not in gone]
        # The last rows move to free ones, so that no other row's cache is copied.
        rows = [b for b, request in enumerate(self.batch.requests) if request not in gone]
        if not rows:
            self.batch = None
            return
        stay = [b for b in rows if b < len(rows)]
        come = [b for b in rows if b >= len(rows)]
        keep = [b if b in stay else come.pop() for b in range(len(rows))]
        with torch.inference_mode():
            self.batch.select(keep)

    def clear(self) -> None:
        """Drop all requests, in any state that a failure has left them in."""
        self.answers, self._before, self._first, self.batch = {}, {}, [], None

    def _spent(self) -> dict[str, float]:
        """Return the seconds in the forwards of each network so far."""
        return {} if self.batch is None else {n: x.seconds for n, x in self.batch.networks.items()}

    def _account(self, request: int) -> None:
        """Fill in the passes and the split of the seconds when a request ends."""
        stats = self.answers[request].stats
        passes, spent, began = self._before[request]
        assert self.batch is not None
        networks = self.batch.networks
        taken = {name: n.passes - passes[name] for name, n in networks.items()}
        seconds = {name: n.seconds - spent[name] for name, n in networks.items()}
        stats.target_passes, stats.drafter_passes = taken["target"], taken.get("drafter", 0)
        stats.target_s, stats.drafter_s = seconds["target"], seconds.get("drafter", 0.0)
        stats.sampler_s = self._seconds - began - stats.target_s - stats.drafter_s
