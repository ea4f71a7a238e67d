"""Counts and times of a server since its start, in Prometheus' text format with vLLM's names."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate

from decoding.engine.params import Result, accepted_counts

SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class Histogram:
    """How many values were at most as large as each of SECONDS, and their sum."""

    def __init__(self) -> None:
        self.within, self.sum = [0] * (len(SECONDS) + 1), 0.0

    def add(self, value: float, count: int = 1) -> None:
        """Count a value, or as many as large."""
        self.within[bisect_left(SECONDS, value)] += count
        self.sum += value * count

    @property
    def count(self) -> int:
        """Return how many values there were."""
        return sum(self.within)

    def lines(self, name: str) -> Iterator[str]:
        """Yield its lines."""
        bounds = [*map(str, SECONDS), "+Inf"]
        for bound, count in zip(bounds, accumulate(self.within)):
            yield f'{name}_bucket{{le="{bound}"}} {count}'
        yield f"{name}_sum {self.sum}"
        yield f"{name}_count {self.count}"


@dataclass
class Counts:
    """Counts and times since the server's start.

    Attributes:
        requests: By how they ended: a finish reason, 'cancelled' or 'failed'.
        prompt_tokens, tokens: Of the prompts and of the answers that have ended.
        reused: Tokens of these prompts that the target did not read again.
        drafts: Target passes of these answers that verified a draft.
        drafted: Tokens of these drafts together.
        accepted: How many drafts had at least i + 1 tokens accepted, for each position i.
        queued, first, between, whole: Seconds that requests waited, to their first token, between
            two tokens, and in all.
    """

    requests: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    prompt_tokens: int = 0
    tokens: int = 0
    reused: int = 0
    drafts: int = 0
    drafted: int = 0
    accepted: list[int] = field(default_factory=list)
    queued: Histogram = field(default_factory=Histogram)
    first: Histogram = field(default_factory=Histogram)
    between: Histogram = field(default_factory=Histogram)
    whole: Histogram = field(default_factory=Histogram)

    def add(self, prompt: int, result: Result) -> None:
        """Count an answer that has ended, to a prompt of so many tokens."""
        stats = result.stats
        self.requests[result.finish_reason] += 1
        self.prompt_tokens += prompt
        self.tokens += len(result.token_ids)
        self.reused += stats.reused
        if stats.drafted:
            positions = -(-stats.drafted // len(stats.emitted))
            drafts, accepted = accepted_counts(stats.emitted, positions)
            self.drafts, self.drafted = self.drafts + drafts, self.drafted + stats.drafted
            self.accepted += [0] * (positions - len(self.accepted))
            for i, number in enumerate(accepted):
                self.accepted[i] += number


@dataclass(kw_only=True)
class Now:
    """The state of a server at one moment.

    Attributes:
        running, waiting: Requests that are decoded, and that wait.
        cache_bytes, cache_used: Keys and values of those that are decoded: their bytes, and the
            part of all slots, from 0 to 1, that has a token.
        loaded: When the export was loaded that is served, in seconds since 1970.
        prefix_bytes: Bytes of prompts that are kept for others; None where nothing is kept.
    """

    running: int
    waiting: int
    cache_bytes: int
    cache_used: float
    loaded: float
    prefix_bytes: int | None = None


def exposition(counts: Counts, now: Now) -> str:
    """Return the counts since the start, and the state now, in Prometheus' text format."""
    lines: list[str] = []

    def metric(
        name: str, kind: str, values: float | Mapping[str, float], whose: str = "vllm"
    ) -> None:
        lines.append(f"# TYPE {whose}:{name} {kind}")
        values = values if isinstance(values, Mapping) else {"": values}
        lines.extend(f"{whose}:{name}{labels} {value}" for labels, value in values.items())

    metric("num_requests_running", "gauge", now.running)
    metric("num_requests_waiting", "gauge", now.waiting)
    metric("kv_cache_usage_perc", "gauge", now.cache_used)
    metric("kv_cache_bytes", "gauge", now.cache_bytes, "parade")
    metric("export_loaded_timestamp_seconds", "gauge", now.loaded, "parade")
    metric("prompt_tokens_total", "counter", counts.prompt_tokens)
    metric("generation_tokens_total", "counter", counts.tokens)
    ended = {f'{{finished_reason="{r}"}}': n for r, n in sorted({**counts.requests}.items())}
    metric("request_success_total", "counter", ended)
    metric("spec_decode_num_drafts_total", "counter", counts.drafts)
    metric("spec_decode_num_draft_tokens_total", "counter", counts.drafted)
    metric("spec_decode_num_accepted_tokens_total", "counter", sum(counts.accepted))
    by_position = {f'{{position="{i}"}}': n for i, n in enumerate(counts.accepted)}
    metric("spec_decode_num_accepted_tokens_per_pos_total", "counter", by_position)
    if now.prefix_bytes is not None:
        metric("prefix_cache_hits_total", "counter", counts.reused)  # in tokens
        metric("prefix_cache_bytes", "gauge", now.prefix_bytes, "parade")
    times = {
        "request_queue_time_seconds": counts.queued,
        "time_to_first_token_seconds": counts.first,
        "inter_token_latency_seconds": counts.between,
        "e2e_request_latency_seconds": counts.whole,
    }
    for name, histogram in times.items():
        lines += [f"# TYPE vllm:{name} histogram", *histogram.lines(f"vllm:{name}")]
    return "\n".join(lines) + "\n"
