"""Load on a server and attacks on it: what clients see, and what must not be so."""

import asyncio
import json
import random
import subprocess
import time
from collections import defaultdict, deque
from pathlib import Path

import httpx

GRACE = 30  # seconds, of the server
PROMPTS = ("def area", "self return", "class name for", "x", "if value in key:\n    return")
HEAD = "POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
LARGE = f"{HEAD}Content-Length: 3900000\r\n\r\n"
STREAM = json.dumps({"prompt": "x", "max_tokens": 16, "stream": True, "logprobs": 20})
PROMPTLESS = '{"n": 64, "prompt": [%s""]}' % ('"",' * 100_000)
HOSTILE = (
    "",
    HEAD,
    LARGE + '{"prompt": "' + "a" * 3_800_000,
    LARGE + '{"prompt": "' + "a" * 3_899_986 + '"}',
    f"{HEAD}Content-Length: {len(STREAM)}\r\n\r\n{STREAM}",
    f"{HEAD}Content-Length: {len(PROMPTLESS)}\r\n\r\n{PROMPTLESS}",
    f"{HEAD}Transfer-Encoding: chunked\r\n\r\n" + "1\r\n \r\n" * 10_000,
)
FORMS = (  # what a fifth of the answers match
    {"choice": ["yes", "no", "it depends"]},
    {"regex": "[a-z]{1,8}( [a-z]{1,8}){0,5}[.]"},
    {
        "json": {
            "type": "object",
            "properties": {"name": {"enum": ["a", "b"]}, "size": {"type": "integer"}},
            "required": ["name", "size"],
            "additionalProperties": False,
        }
    },
)
TOOL = {  # that another fifth must call
    "type": "function",
    "function": {"name": "area", "parameters": {**FORMS[2]["json"], "required": ["name"]}},
}
TEMPLATE = (  # short, as small models have room for few tokens
    "{% if tools %}{{ tools[0].function.name }}: <tool_call>{% endif %}"
    "{% for m in messages %}{{ m.content }}\n{% endfor %}"
)
NONSENSE = ("{", '{"prompt": 3}', '{"prompt": "a", "max_tokens": -1}', "\0")


class Load:
    """Record the answers, times and errors that clients see.

    Attributes:
        texts: By request: all texts that it was answered with.
        counts: Answers, cut off, refused and wrong ones.
        first, between: Seconds to the first piece of text, and between two, alone (False) and while
            others attack the server (True).
    """

    def __init__(self, address: str, seconds: float, parts: int = 10):
        self.address, self.begun, self.part = address, time.monotonic(), seconds / parts
        self.ends = self.begun + seconds
        self.texts: dict[str, list[str]] = defaultdict(list)
        self.counts: dict[str, int] = defaultdict(int)
        self.first: dict[bool, list[float]] = {False: [], True: []}
        self.between: dict[bool, list[float]] = {False: [], True: []}
        self.held: deque[asyncio.StreamWriter] = deque()

    @property
    def attacked(self) -> bool:
        """Whether this is a part of the time with hostile clients."""
        return int((time.monotonic() - self.begun) / self.part) % 2 == 1

    def of(self, body: dict) -> str:
        """The address for a request."""
        return self.address.replace(
            "/completions", "/chat/completions" if "tools" in body else "/completions"
        )

    async def hostile(self, number: int) -> None:
        """Attack the server in the parts of the time that are for it."""
        draw, url = random.Random(-1 - number), httpx.URL(self.address)
        while time.monotonic() < self.ends:
            await asyncio.sleep(3 * draw.random())  # about as often as others ask
            if not self.attacked:
                continue
            # Nothing is ever read: the limit is of bytes that asyncio reads itself.
            _, writer = await asyncio.open_connection(url.host, url.port, limit=1)
            writer.write(draw.choice(HOSTILE).encode())
            self.counts["attacks"] += 1
            self.held.append(writer)
            if len(self.held) > 100:
                self.held.popleft().close()

    async def client(self, http: httpx.AsyncClient, number: int) -> None:
        """Ask until the time is over."""
        draw = random.Random(number)
        while time.monotonic() < self.ends:
            kind = draw.random()
            if kind < 0.05:
                reply = await http.post(self.address, content=draw.choice(NONSENSE))
                self.counts["refused" if reply.status_code == 400 else "not refused"] += 1
                continue
            body = {
                "prompt": draw.choice(PROMPTS),
                "seed": draw.randrange(12),
                "max_tokens": draw.choice((4, 16, 40, 80)),
                "temperature": draw.choice((0, 1)),
            }
            if 0.2 < kind < 0.4:
                body["structured_outputs"] = draw.choice(FORMS)
            elif 0.4 < kind < 0.6:
                asked = {"role": "user", "content": body.pop("prompt")}
                body |= {"messages": [asked], "tools": [TOOL], "tool_choice": "required"}
            try:
                await self.ask(http, body, cut=kind < 0.15)
            except (httpx.HTTPError, AssertionError) as error:
                self.counts[f"error: {error!r}"[:200]] += 1

    async def ask(self, http: httpx.AsyncClient, body: dict, cut: bool) -> None:
        """One request, as a stream."""
        last, parts, begun = time.monotonic(), [], False
        async with http.stream("POST", self.of(body), json={**body, "stream": True}) as reply:
            assert reply.status_code == 200, await reply.aread()
            async for line in reply.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                got, now = json.loads(line[6:]), time.monotonic()
                assert "error" not in got, got
                (self.between if begun else self.first)[self.attacked].append(now - last)
                last, begun = now, True
                parts.append(got["choices"][0])
                if cut:
                    self.counts["cut off"] += 1
                    return
        self.counts["answered"] += 1
        self.texts[json.dumps(body)].append(said(parts))


async def measured(
    address: str, process: subprocess.Popen, seconds: float, clients: int, parts: int = 10
) -> dict:
    """The load, and what came of it; the server is ended."""
    load, memory = Load(f"{address}v1/completions", seconds, parts), []
    hostile = -(-clients // 20)

    async def watch():
        while time.monotonic() < load.ends:
            pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
            memory.append(pages * 4096 // 2**20)
            await asyncio.sleep(5)

    limits = httpx.Limits(max_connections=2 * clients)
    async with httpx.AsyncClient(timeout=300, limits=limits) as http:
        await asyncio.gather(
            watch(),
            *(load.client(http, n) for n in range(clients)),
            *(load.hostile(n) for n in range(hostile)),
        )
        other = []
        for body, texts in load.texts.items():
            reply = await http.post(load.of(json.loads(body)), json=json.loads(body))
            alone = said(reply.json()["choices"])
            other += [body for text in texts if text != alone]
    begun = time.monotonic()
    process.terminate()
    status = await asyncio.to_thread(process.wait, 120)
    ending = time.monotonic() - begun
    for writer in load.held:
        writer.transport.abort()
    after_a_minute = memory[min(12, len(memory) - 1)]
    return {
        **load.counts,
        "kinds of requests": len(load.texts),
        "texts that differ from the one alone": len(other),
        "ms to the first piece, p50 and p95": quantiles(load.first[False]),
        "the same under attack": quantiles(load.first[True]),
        "ms between pieces, p50 and p95": quantiles(load.between[False]),
        "the same between them under attack": quantiles(load.between[True]),
        "status of the server": status,
        "seconds from SIGTERM to its end": round(ending, 1),
        "MiB at the start, after a minute, at the end": [memory[0], after_a_minute, memory[-1]],
    }


def said(parts: list[dict]) -> str:
    """The text of an answer, whole or in pieces, and then the calls in it.

    A text beside calls begins and ends without space where it comes whole.
    """
    messages = [part.get("message", part.get("delta", part)) for part in parts]
    text = "".join(m.get("content", m.get("text")) or "" for m in messages)
    calls = [call["function"] for m in messages for call in m.get("tool_calls", [])]
    if not calls:
        return text
    return text.strip() + "".join(f"{c['name']}{c['arguments']}" for c in calls)


def quantiles(seconds: list[float]) -> list[float]:
    """The median and the 95th percentile, in ms."""
    known = sorted(seconds)
    return [round(1000 * known[int(p * (len(known) - 1))], 1) for p in (0.5, 0.95)]


def wrong(result: dict, slower: float = 1.1) -> list[str]:
    """List the names of the figures that a load must not have; an empty list passes."""
    found = [k for k in result if k.startswith(("error", "not refused"))]
    other, ending = "texts that differ from the one alone", "seconds from SIGTERM to its end"
    found += [other] * (result[other] > 0) + [ending] * (result[ending] > GRACE + 10)
    found += ["status of the server"] * (result["status of the server"] != 0)
    for alone, attacked in (
        ("ms to the first piece, p50 and p95", "the same under attack"),
        ("ms between pieces, p50 and p95", "the same between them under attack"),
    ):
        found += [attacked] * (result[attacked][1] > slower * result[alone][1])
    return found
