"""Load on a server: clients that come, hang up and talk nonsense; a text must be its seed's alone.

    python -m tests.load model=runs/deer_stage2/export minutes=10 clients=32

Mixed lengths and temperatures from 12 seeds; 10% are cut off after their first piece, 5% are
malformed. At the end every kind of request is asked again, alone.
"""

import asyncio
import json
import random
import re
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import httpx

PROMPTS = ("def area", "self return", "class name for", "x", "if value in key:\n    return")
NONSENSE = ("{", '{"prompt": 3}', '{"prompt": "a", "max_tokens": -1}', "\0")


class Load:
    """What clients have seen.

    Attributes:
        texts: By request: all texts that it was answered with.
        counts: Answers, cut off, refused and wrong ones.
        first, between: Seconds to the first piece of text, and between two.
    """

    def __init__(self, address: str, seconds: float):
        self.address, self.ends = address, time.monotonic() + seconds
        self.texts: dict[str, list[str]] = defaultdict(list)
        self.counts: dict[str, int] = defaultdict(int)
        self.first: list[float] = []
        self.between: list[float] = []

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
            try:
                await self.ask(http, body, cut=kind < 0.15)
            except (httpx.HTTPError, AssertionError) as error:
                self.counts[f"error: {error!r}"[:200]] += 1

    async def ask(self, http: httpx.AsyncClient, body: dict, cut: bool) -> None:
        """One request, as a stream."""
        last, text, begun = time.monotonic(), "", False
        async with http.stream("POST", self.address, json={**body, "stream": True}) as reply:
            assert reply.status_code == 200, reply.status_code
            async for line in reply.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                got, now = json.loads(line[6:]), time.monotonic()
                assert "error" not in got, got
                (self.between if begun else self.first).append(now - last)
                last, begun, text = now, True, text + got["choices"][0]["text"]
                if cut:
                    self.counts["cut off"] += 1
                    return
        self.counts["answered"] += 1
        self.texts[json.dumps(body)].append(text)


async def measured(address: str, process: subprocess.Popen, seconds: float, clients: int) -> dict:
    """The load, and what came of it."""
    load, memory = Load(f"{address}v1/completions", seconds), []

    async def watch():
        while time.monotonic() < load.ends:
            pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
            memory.append(pages * 4096 // 2**20)
            await asyncio.sleep(5)

    limits = httpx.Limits(max_connections=2 * clients)
    async with httpx.AsyncClient(timeout=300, limits=limits) as http:
        await asyncio.gather(watch(), *(load.client(http, n) for n in range(clients)))
        other = []
        for body, texts in load.texts.items():
            reply = await http.post(load.address, json=json.loads(body))
            alone = reply.json()["choices"][0]["text"]
            other += [body for text in texts if text != alone]
    after_a_minute = memory[min(12, len(memory) - 1)]
    return {
        **load.counts,
        "kinds of requests": len(load.texts),
        "texts that differ from the one alone": len(other),
        "ms to the first piece, p50 and p95": quantiles(load.first),
        "ms between pieces, p50 and p95": quantiles(load.between),
        "MiB at the start, after a minute, at the end": [memory[0], after_a_minute, memory[-1]],
    }


def quantiles(seconds: list[float]) -> list[float]:
    """The median and the 95th percentile, in ms."""
    known = sorted(seconds)
    return [round(1000 * known[int(p * (len(known) - 1))], 1) for p in (0.5, 0.95)]


def main() -> None:
    """Start the server, load it, and print what came of it; status 1 where a text was another."""
    given = dict(pair.partition("=")[::2] for pair in sys.argv[1:])
    minutes, clients = float(given.pop("minutes", 10)), int(given.pop("clients", 32))
    command = [sys.executable, "-m", "decoding.serve", "port=0", "dtype=float32"]
    process = subprocess.Popen(
        [*command, *(f"{k}={v}" for k, v in given.items())], stdout=subprocess.PIPE, text=True
    )
    try:
        while not (found := re.search(r"http://\S+/", line := process.stdout.readline())):
            assert line, "the server has ended"
        result = asyncio.run(measured(found[0], process, 60 * minutes, clients))
    finally:
        process.terminate()
    result["status of the server"] = process.wait(60)
    print(json.dumps(result, indent=1))
    wrong = [k for k in result if k.startswith(("error", "not refused"))]
    sys.exit(bool(wrong or result["texts that differ from the one alone"]))


if __name__ == "__main__":
    main()
