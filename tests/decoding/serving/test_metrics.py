"""Metrics as Prometheus reads them, and the log of requests."""

import json
import logging
import re
import threading
from pathlib import Path

from starlette.testclient import TestClient

from decoding.engine.params import SamplingParams
from decoding.engine.prefixes import Prefixes
from decoding.samplers.plain import PlainSampler
from decoding.serving.app import Server
from decoding.serving.metrics import SECONDS, Histogram
from decoding.serving.scheduler import Scheduler, requests_log
from tests.support import tiny
from tests.support.gated import GatedPlain
from tests.support.samplers import dflash

V = 24
ROOT = Path(__file__).parents[3]


def test_a_histogram_counts_what_is_at_most_as_large():
    found = Histogram()
    for value, count in ((0.0, 1), (SECONDS[0], 2), (SECONDS[0] * 1.01, 1), (1e9, 3)):
        found.add(value, count)
    lines = [*found.lines("x")]
    assert lines[0] == f'x_bucket{{le="{SECONDS[0]}"}} 3'
    assert lines[1] == f'x_bucket{{le="{SECONDS[1]}"}} 4'
    assert lines[len(SECONDS) - 1].endswith(" 4")
    assert lines[len(SECONDS)] == 'x_bucket{le="+Inf"} 7'
    assert (lines[-1], found.sum > 3e9 - 1) == ("x_count 7", True)


def values_of(text):
    """{metric with its labels: value} of what `/metrics` answers."""
    return dict(line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")


def test_the_cache_in_use_is_that_of_the_requests_being_decoded():
    sampler = GatedPlain()
    scheduler = Scheduler({"m": sampler}, at_once=2, waiting=2, longest=32)
    server = Server(scheduler, sampler.tokenizer, key=None, most=10_000, seconds=60.0)
    params = SamplingParams(max_new_tokens=3, ignore_eos=True)
    ended = threading.Event()

    def used():
        found = values_of(http.get("/metrics").text)
        return float(found["vllm:kv_cache_usage_perc"]), int(found["parade:kv_cache_bytes"])

    def show(chunk):
        if chunk.result is not None:
            ended.set()

    with TestClient(server.app()) as http:
        assert used() == (0.0, 0)
        scheduler.submit([("m", [1, 2, 3, 4], params, 0, show)])
        sampler.until(lambda: len(sampler.log) == 1)
        sampler.go(1)
        sampler.until(lambda: len(sampler.log) == 2)
        (running,) = scheduler._groups.values()
        memory = running.batch.networks["target"].cache._memory.values()
        assert used() == (5 / (2 * 32), sum(m.nbytes for m in memory))
        assert used()[1] > 0
        sampler.go(10)
        assert ended.wait(20)
        sampler.until(lambda: used() == (0.0, 0))


def board():
    """Every query of the board for Grafana."""
    found = json.loads((ROOT / "examples" / "grafana.json").read_text())
    panels = [target["expr"] for panel in found["panels"] for target in panel["targets"]]
    return found, panels + [note["expr"] for note in found["annotations"]["list"]]


def missing(queries, text):
    """Metrics and labels that queries ask for and `/metrics` does not have."""
    labels = {}
    for name, of in re.findall(r"^([a-z]+:\w+)(?:{(.*)})? ", text, re.M):
        labels.setdefault(name, set()).update(re.findall(r'(\w+)="', of))
    lost = set()
    for query in queries:
        names = re.findall(r"\b[a-z]+:\w+", query)
        assert names, query
        lost |= {*names} - labels.keys()
        for by, name in re.findall(r"by \((\w+)\) \(rate\(([a-z]+:\w+)", query):
            lost |= {by} - labels.get(name, set())
    return lost


def test_the_board_asks_for_what_the_metrics_have():
    sampler = dflash(tiny.causal_lm(V), 2)
    sampler.prefixes = Prefixes(10**8, part=16)
    scheduler = Scheduler({"m": sampler}, at_once=4, waiting=4, longest=128)
    server = Server(scheduler, sampler.tokenizer, key=None, most=100_000, seconds=60.0)
    with TestClient(server.app()) as http:
        http.post("/v1/completions", json={"prompt": "abc", "max_tokens": 5, "verify": "tree"})
        text = http.get("/metrics").text
    found, queries = board()
    assert missing(queries, text) == set()
    assert missing(["sum by (reason) (rate(vllm:request_total[1m]))"], text) == {
        "vllm:request_total",
        "reason",
    }
    families = {*re.findall(r"^# TYPE (\S+) ", text, re.M)}
    shown = {name.removesuffix("_bucket") for q in queries for name in re.findall(r"\w+:\w+", q)}
    assert families == shown
    places = [tuple(panel["gridPos"].values()) for panel in found["panels"]]
    assert len({*places}) == len({panel["id"] for panel in found["panels"]}) == len(places)
    (source,) = found["templating"]["list"]
    uids = {target["datasource"]["uid"] for panel in found["panels"] for target in panel["targets"]}
    assert uids == {f"${{{source['name']}}}"}


def test_requests_are_counted_timed_and_logged(caplog):
    plain = PlainSampler(tiny.causal_lm(V).float(), tiny.tokenizer(V))
    plain.prefixes = Prefixes(10**8, part=16)
    scheduler = Scheduler({"m": plain}, at_once=4, waiting=4, longest=128)
    server = Server(scheduler, plain.tokenizer, key=None, most=100_000, seconds=60.0)
    ask = {"prompt": "abcdefgh" * 6, "max_tokens": 5}
    with (
        TestClient(server.app()) as http,
        caplog.at_level(logging.INFO, requests_log.name),
    ):
        for reused in (0, 32):  # whole parts of 47 tokens
            usage = http.post("/v1/completions", json=ask).json()["usage"]
            assert usage["prompt_tokens_details"] == {"cached_tokens": reused}
        text = http.get("/metrics").text
    for line in text.splitlines():
        assert re.fullmatch(r'# TYPE \S+ \w+|\w+:\w+({\w+="[^"]+"})? [\d.e+-]+', line), line
    values = values_of(text)
    assert values["vllm:generation_tokens_total"] == "10"
    assert values["vllm:time_to_first_token_seconds_count"] == "2"
    assert values["vllm:e2e_request_latency_seconds_count"] == "2"
    assert values["vllm:request_queue_time_seconds_count"] == "2"
    assert int(values["vllm:inter_token_latency_seconds_count"]) == 8
    assert int(values["vllm:prefix_cache_hits_total"]) == 32
    assert int(values["parade:prefix_cache_bytes"]) > 0
    lines = [json.loads(record.message) for record in caplog.records]
    assert [line["request"] for line in lines] == [0, 1]
    assert all(line["tokens"] == 5 and line["ended"] == "length" for line in lines)
    assert all(0 < line["first_token_seconds"] <= line["seconds"] for line in lines)
