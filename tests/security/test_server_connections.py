"""Clients that say nothing, half a request, or read nothing: nobody waits for them."""

import asyncio
import gc
import socket
import threading
import time
from contextlib import contextmanager, suppress
from functools import partial

import httpx
import pytest
import uvicorn

from decoding.samplers.plain import PlainSampler
from decoding.serving import app, connections
from decoding.serving.app import Server
from decoding.serving.connections import Connection, Http, room
from decoding.serving.scheduler import Scheduler
from tests.support import tiny

pytestmark = pytest.mark.processes

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
CHUNKED = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
GET = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
FINE = {"prompt": "abc", "max_tokens": 2}
BIG = 2**23  # bytes


async def respond(scope, receive, send):
    """Send a large body at /whole, and one without an end at /stream."""

    async def gone():
        while (await receive())["type"] != "http.disconnect":
            pass

    await send({"type": "http.response.start", "status": 200, "headers": []})
    left = asyncio.ensure_future(gone())
    while scope["path"] == "/stream" and not left.done():
        await send({"type": "http.response.body", "body": b"x" * 2**16, "more_body": True})
        await asyncio.sleep(0)
    left.cancel()
    await send({"type": "http.response.body", "body": b"x" * BIG})


@pytest.fixture
def patient(monkeypatch):
    """All clocks run for less than a second."""
    monkeypatch.setattr(connections, "PATIENCE", 0.6)
    monkeypatch.setattr(app, "PATIENCE", 0.6)
    monkeypatch.setattr(connections, "HURRY", 0.3)


@contextmanager
def listening(asgi, most=100, end=lambda: None):
    """(port, server) of an application behind `Connection`s."""
    options = {"log_level": "error", "lifespan": "on" if asgi is not respond else "off"}
    config = uvicorn.Config(
        asgi, http=partial(Connection, most=most), timeout_graceful_shutdown=5, **options
    )
    own = socket.create_server(("127.0.0.1", 0))
    http = Http(config, end)
    thread = threading.Thread(target=http.run, kwargs={"sockets": [own]})
    thread.start()
    http.thread = thread
    try:
        yield own.getsockname()[1], http
    finally:
        http.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


def serving(**options):
    """A server of a tiny model."""
    sampler = PlainSampler(tiny.causal_lm(12), tiny.tokenizer(12))
    scheduler = Scheduler({"m": sampler}, at_once=3, waiting=2, longest=32)
    given = {"key": None, "most": 4_000_000, "seconds": 20.0, **options}
    return Server(scheduler, sampler.tokenizer, **given)


@contextmanager
def served(most=100, **options):
    server = serving(**options)
    with listening(server.app(), most, lambda: server.end_within(2)) as (port, http):
        yield port, http, server


def connect(port, data=b"", buffer=None):
    one = socket.socket()
    one.settimeout(20)
    if buffer:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    one.connect(("127.0.0.1", port))
    one.sendall(data)
    return one


def ended(one, drip=b""):
    """(what a connection says until it is closed, seconds); `drip` is sent all the time."""
    begun, said = time.monotonic(), b""
    one.settimeout(0.1)
    while time.monotonic() < begun + 10:
        with suppress(TimeoutError):
            try:
                if drip:
                    one.sendall(drip)
                if not (more := one.recv(2**16)):
                    return said, time.monotonic() - begun
                said += more
            except ConnectionError:
                return said, time.monotonic() - begun
    raise AssertionError("still open")


def answered(port, **more):
    reply = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=FINE, timeout=10, **more)
    return reply.status_code == 200


HALF = {
    "silent": (b"", b"", b""),
    "half a head": (GET[:-4], b"", b""),
    "a head without an end": (GET[:-2], b"a: b\r\n", b""),
    "half a body": (HEAD % 100 + b"{", b"", b"408"),
    "a body without an end": (HEAD % 10**6 + b"{", b" ", b"408"),
    "a chunk without an end": (CHUNKED + b"fffff\r\n", b"x", b"408"),
    "silent after an answer": (GET, b"", b"200"),
    "a body after its answer": (GET[:-2] + b"Content-Length: 999999\r\n\r\n", b"x", b"200"),
    "half a second request": (GET + GET[:-4], b"", b"200"),
}


@pytest.mark.parametrize("name", HALF)
def test_who_keeps_the_server_waiting_is_let_go(patient, name):
    begin, drip, status = HALF[name]
    with served() as (port, _, _), connect(port, begin) as one:
        said, seconds = ended(one, drip)
        assert status in said
        assert seconds < 5
        assert answered(port)


def test_who_asks_in_time_is_not(patient):
    with served() as (port, http, _), httpx.Client() as client:
        for _ in range(6):  # together longer than any clock
            assert client.get(f"http://127.0.0.1:{port}/health").status_code == 200
            time.sleep(0.2)
        assert http.server_state.total_requests == 6
        assert len(http.server_state.connections) == 1


def test_without_a_clock_they_stay(patient, monkeypatch):
    monkeypatch.setattr(Connection, "_give_up", lambda self: None)
    with served() as (port, http, _), connect(port, GET[:-4]) as one:
        time.sleep(1.5)
        assert len(http.server_state.connections) == 1
        one.close()


@pytest.mark.parametrize(
    "begin", [b"", GET[:-4], HEAD % 100 + b"{"], ids=["silent", "head", "body"]
)
def test_more_connections_than_allowed(begin):
    with served(most=10) as (port, http, _):
        held = [connect(port, begin) for _ in range(40)]
        assert answered(port)
        assert len(http.server_state.connections) <= 11
        for one in held:
            one.close()


def test_the_silent_go_before_those_that_ask():
    with served(most=4) as (port, _, _):
        asking = connect(port, HEAD % 26 + b'{"prompt": "abc"')
        time.sleep(0.2)
        held = [connect(port) for _ in range(20)]
        time.sleep(0.3)
        asking.sendall(b', "n": 1 }')
        assert b"200 OK" in asking.recv(2**16)
        for one in [asking, *held]:
            one.close()


def test_room_is_within_the_files_of_the_process(monkeypatch):
    import resource

    def at(files):
        monkeypatch.setattr(resource, "getrlimit", lambda _: (files, files))
        return room(1024)

    for files in (100, 200, 1024, 4096):
        most, backlog = at(files)
        assert most + 4 * backlog <= max(files - 64, 16)
    assert at(10**6) == at(resource.RLIM_INFINITY) == (1024, 128)


@pytest.mark.parametrize("path", ["whole", "stream"])
def test_who_does_not_read_is_let_go(patient, path):
    asks = b"GET /%s HTTP/1.1\r\nHost: x\r\n\r\n" % path.encode()
    with listening(respond) as (port, http), connect(port, asks, 2048):
        time.sleep(0.3)
        assert len(http.server_state.connections) == 1
        ends = time.monotonic() + 10
        while http.server_state.connections:
            assert time.monotonic() < ends
            time.sleep(0.05)


def test_who_reads_slowly_gets_everything(patient):
    asks = b"GET /whole HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    with listening(respond) as (port, _), connect(port, asks) as one:
        size = 0
        while more := one.recv(2**16):
            size += len(more)
            time.sleep(0.015)  # two seconds in all
    assert size > BIG


@pytest.mark.parametrize("begin", [b"", GET[:-4], HEAD % 100 + b"{", GET, GET + GET[:-4]])
def test_the_end_does_not_wait_for_them(begin):
    with served() as (port, http, _):
        held = [connect(port, begin) for _ in range(5)]
        time.sleep(0.3)
        begun, http.should_exit = time.monotonic(), True
        http.thread.join(20)
        assert time.monotonic() - begun < 9
        for one in held:
            one.close()


def test_nor_for_one_that_does_not_read(monkeypatch):
    monkeypatch.setattr(connections, "HURRY", 0.5)
    asks = b"GET /stream HTTP/1.1\r\nHost: x\r\n\r\n"
    with listening(respond) as (port, http), connect(port, asks, 2048):
        time.sleep(0.5)
        begun, http.should_exit = time.monotonic(), True
        http.thread.join(20)
        assert time.monotonic() - begun < 4


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("size", [5_000_000, 40_000_000])
def test_a_client_sees_its_413(chunked, size):
    """It sends all of its body, and then reads."""
    begin = CHUNKED + b"%x\r\n" % size if chunked else HEAD % size
    with served() as (port, _, _), connect(port, begin) as one:
        one.sendall(b"x" * size + (b"\r\n0\r\n\r\n" if chunked else b""))
        assert one.recv(2**16).startswith(b"HTTP/1.1 413 ")
        one.sendall(GET.replace(b"1.1\r\n", b"1.1\r\nConnection: close\r\n"))  # the same one
        assert b"HTTP/1.1 200 " in ended(one)[0]


def test_a_body_without_end_is_cut(monkeypatch):
    monkeypatch.setattr(connections, "DISCARDED", 10**7)
    with served() as (port, _, _), connect(port, CHUNKED) as one:
        piece = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
        with pytest.raises(ConnectionError):
            one.sendall(piece * 1000)


def test_all_bodies_together_have_a_bound(monkeypatch):
    monkeypatch.setattr(app, "HELD", 1_000_000)
    with served(most=100) as (port, _, server):
        server.most = 250_000
        half = HEAD % 240_000 + b" " * 200_000
        held = []
        for _ in range(12):
            held.append(connect(port, half))
            time.sleep(0.05)
            assert sum(map(len, server._coming.values())) <= 1_000_000
        assert answered(port)
        assert sum(map(len, server._coming.values())) > 500_000
        for one in held:
            one.close()


def test_many_tiny_chunks_are_refused():
    with served() as (port, _, _):
        with connect(port, CHUNKED + b"1\r\n \r\n" * 100_000) as one:
            said, seconds = ended(one)
            assert said.startswith(b"HTTP/1.1 400 ") or not said  # it was still sending
            assert seconds < 5
        body = [b'{"prompt": ', b'"abc"', *[b" "] * 500, b"}"]
        reply = httpx.post(f"http://127.0.0.1:{port}/v1/completions", content=iter(body))
        assert reply.status_code == 200


def test_garbage_after_an_answer_is_no_error(caplog):
    with served(key="secret") as (port, _, _):
        for after in (b"zzz\r\n", b"\x00\xff\r\n" * 10):
            with connect(port, CHUNKED) as one:
                assert b"401" in one.recv(2**16)
                one.sendall(after)
                ended(one)
        assert answered(port, headers={"Authorization": "Bearer secret"})
    gc.collect()
    assert not caplog.records


def test_pipelined_requests_are_answered_in_order():
    with served() as (port, _, _), connect(port, GET * 50) as one:
        said = b""
        while said.count(b"HTTP/1.1 200 OK") < 50:
            said += one.recv(2**16)


def test_heads_have_a_bound():
    with served() as (port, _, _), connect(port, GET[:-2]) as one:
        _, seconds = ended(one, b"".join(b"a%d: b\r\n" % i for i in range(1000)))
        assert seconds < 5
        assert answered(port)
