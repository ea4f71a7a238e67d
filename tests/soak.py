"""Hours of training and of decoding need no more memory, files or threads than minutes.

`python -m tests.soak [minutes=60] [what=[fit,decode]]`: a training of tiny networks that writes
checkpoints and validates all the time, and a process that decodes random requests one after the
other. Status 1 if the last third of the time needs more than the second third.
"""

import os
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Literal

import psutil
from pydantic import Field

from data.arguments import Seed, Several
from decoding import SamplingParams, load
from recipes.command import main
from recipes.options import Options, option, parse
from tests.support.lab import prepared

RUN = ("deer_stage2", "trainer.max_steps=100000000", "trainer.checkpoint_every=50",
       "trainer.validate_every=50", "trainer.log_every=1")  # fmt: skip
SLACK = 1.02  # of memory: allocators keep a few pages


@dataclass(frozen=True, kw_only=True)
class Soak(Options):
    """Watch a training and a decoding process."""

    minutes: Annotated[float, Field(ge=0.1)] = option(60.0, "of each")
    what: Several[Literal["fit", "decode"]] = option(("fit", "decode"), "runs")
    seed: Seed = option(0, "of the requests")


def run(argv: list[str]) -> None:
    """The command."""
    s = parse(argv or ["minutes=60"], Soak, "tests.soak")
    with tempfile.TemporaryDirectory() as root:
        lab = prepared(Path(root))
        commands = {
            "fit": [sys.executable, "-m", "trainers.fit", *lab.arguments(*RUN)],
            "decode": [sys.executable, "-c", f"from tests.soak import decode; decode({s.seed}, "
                       f"{str(lab.runs / 'deer_stage1' / 'export')!r})"],
        }  # fmt: skip
        grew = [watch(name, commands[name], s.minutes * 60) for name in s.what]
    sys.exit(1 if any(grew) else 0)


def watch(name: str, command: list[str], seconds: float) -> list[str]:
    """What a process needs more of in the last third of its time than in the second."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    seen, begun = [], time.monotonic()
    try:
        while time.monotonic() < begun + seconds:
            time.sleep(seconds / 300)
            assert process.poll() is None, f"{name} ended with status {process.returncode}"
            p = psutil.Process(process.pid)
            seen.append((p.memory_info().rss / 2**20, p.num_fds(), p.num_threads()))
    finally:
        process.kill()
        process.wait()
    third, grew = len(seen) // 3, []
    for i, what in enumerate(("MiB", "open files", "threads")):
        middle, last = (median(x[i] for x in part) for part in (seen[third:-third], seen[-third:]))
        print(f"{name}: {what} {middle:g} in the second third of the time, {last:g} in the last")
        if last > middle * (SLACK if i == 0 else 1):
            grew.append(what)
    print(f"{name}: {len(seen)} looks in {seconds / 60:g} minutes; grew: {grew or 'nothing'}")
    return grew


def decode(seed: int, model: str) -> None:
    """Decode requests of every kind for ever."""
    sampler, draw = load(model, dtype="float32"), random.Random(seed)
    while True:
        prompts = ["".join(draw.choices("abc defi", k=draw.randint(1, 40)))] * draw.randint(1, 4)
        params = SamplingParams(
            max_new_tokens=draw.randint(1, 40),
            temperature=draw.choice([0.0, 0.7, 1.0]),
            top_p=draw.choice([1.0, 0.9]),
            repetition_penalty=draw.choice([1.0, 1.1]),
            verify=draw.choice(["coupled", "rejection", "block", "tree"]),
            stop=draw.choice([(), ("a",)]),
            seed=draw.choice([None, draw.randrange(2**32)]),
        )
        if draw.random() < 0.3:
            for _ in sampler.stream(prompts, params):
                if draw.random() < 0.05:  # a client that goes away
                    break
        else:
            sampler.generate(prompts, params)


if __name__ == "__main__":
    main(run)
