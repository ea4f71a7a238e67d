"""What is killed again and again ends as what was left alone, bit for bit.

`python -m tests.chaos [kills=10] [seed=0]`: runs of tiny networks by several methods, with dropout,
are killed with SIGKILL at random moments, in the midst of a checkpoint's write and of an export's,
and resumed each time by the same command; so is a collection. Status 1 if weights, metrics.csv or
shards differ from the undisturbed ones.
"""

import os
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from recipes.command import main
from recipes.folders import LOCK
from recipes.options import parse
from tests.support.kills import kill, last_step
from tests.support.lab import Lab, finish, prepared
from tests.support.runs import same_run

METHODS = ("deer_stage2", "asarm_joint", "dllm_block")
OFTEN = ("trainer.checkpoint_every=10", "trainer.log_every=1", "trainer.validate_every=40")
MOST = 40  # steps until a kill


@dataclass(frozen=True)
class Chaos:
    """Kill runs and a collection `kills` times, at moments drawn with `seed`."""

    kills: int = 10
    seed: int = 0


def run(argv: list[str]) -> None:
    """The command."""
    c = parse(argv or ["kills=10"], Chaos, "tests.chaos")
    started, draw = time.perf_counter(), random.Random(c.seed)
    of_collection = max(1, c.kills // 10)
    shares = [(c.kills - of_collection + i) // len(METHODS) for i in range(len(METHODS))]
    with tempfile.TemporaryDirectory() as root:
        lab = prepared(Path(root))
        found = [killed_run(lab, m, n, draw) for m, n in zip(METHODS, shares)]
        found.append(killed_collection(lab, of_collection, draw))
    print(f"{c.kills} kills, {time.perf_counter() - started:.0f} s")
    sys.exit(0 if all(found) else 1)


def killed_run(lab: Lab, method: str, kills: int, draw: random.Random) -> bool:
    """Whether a run that is killed so many times ends as one that is left alone.

    Of three kills one is in the midst of a checkpoint's write; the last tenth is in an export's.
    """
    of_export = max(1, kills // 10)
    run = (method, *OFTEN, f"trainer.max_steps={MOST * (kills + 1)}")
    folder = lab.runs / method
    finish(lab.start(*run, "name=left_alone"))
    cut = 0
    for number in range(kills - of_export):
        steps = None if number % 3 == 1 else draw.randint(1, MOST)
        what = "a write" if steps is None else f"{steps} steps"
        cut += kill(lab.start(*run, "name=killed"), folder / "killed", steps)
        print(f"{method}: killed in {what}, at step {last_step(folder / 'killed')}", flush=True)
    exports = 0
    for _ in range(of_export):
        exports += kill_export(lab.start(*run, "name=killed"), folder / "killed")
    finish(lab.start(*run, "name=killed"))
    same = same_run(folder / "left_alone", folder / "killed")
    left = [p.name for p in (folder / "killed").rglob(".*") if p.name != LOCK]
    print(
        f"{method}: {kills} kills, {cut} in a checkpoint's write, {exports} in an export's; "
        f"weights and metrics.csv are {'the same' if same else 'NOT THE SAME'}; "
        f"left over: {left or 'none'}"
    )
    return same and exports > 0 and not left


def killed_collection(lab: Lab, kills: int, draw: random.Random) -> bool:
    """Whether a collection that is killed so many times has the shards of one left alone."""
    folder = lab.runs / "deer_answers"

    def start(name: str) -> subprocess.Popen:
        words = lab.collect_arguments("prompts.count=480", f"name={name}")
        return subprocess.Popen(
            [sys.executable, "-m", "decoding.collect", *words],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def shards(name: str) -> dict[str, bytes]:
        return {p.name: p.read_bytes() for p in (folder / name / "shards").glob("[0-9]*")}

    finish(start("left_alone"))
    for _ in range(kills):
        process, before = start("killed"), len(shards("killed"))
        while process.poll() is None and len(shards("killed")) == before:
            time.sleep(0.001)
        time.sleep(draw.random() / 20)
        process.kill()
        process.communicate()
    finish(start("killed"))
    same = shards("left_alone") == shards("killed")
    print(f"collection: {kills} kills; shards are {'the same' if same else 'NOT THE SAME'}")
    return same


def kill_export(process: subprocess.Popen, folder: Path) -> bool:
    """SIGKILL while the run writes its export; whether that was cut."""
    stale = {*folder.glob(".export.*")}
    while process.poll() is None and not {*folder.glob(".export.*")} - stale:
        time.sleep(0.0002)
    process.kill()
    process.communicate()
    return not (folder / "export").exists()


if __name__ == "__main__":
    main(run)
