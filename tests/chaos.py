"""What is killed again and again ends as what was left alone, bit for bit.

`python -m tests.chaos [kills=10] [seed=0]`: runs of tiny networks by several methods, with dropout,
are killed with SIGKILL at random moments, in the midst of a checkpoint's write and of an export's,
and resumed each time by the same command; so is a collection. Status 1 if weights, metrics.csv or
shards differ from the undisturbed ones.
"""

import logging
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

from recipes.command import main
from recipes.folders import LOCK
from recipes.options import parse
from tests.support.lab import Lab
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


def prepared(root: Path) -> Lab:
    """What the runs need: tiny networks that draw dropout while they train."""
    lab = Lab(root)
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        lab.fit("ar_target", "+network.attention_dropout=0.1")
        lab.fit("diffusion_adapt")
        lab.collect()
        lab.fit("deer_stage1")
    return lab


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


def kill(process: subprocess.Popen, folder: Path, steps: int | None) -> bool:
    """SIGKILL after so many logged steps of this process, or in its next write of a checkpoint.

    steps: None for a write. Returns whether a write was cut: what it has left is still there.
    """
    stale, begun = writes(folder), time.time()
    due = (lambda: writes(folder) - stale) if steps is None else logged(folder, begun, steps)
    while process.poll() is None and not due():
        time.sleep(0.0002)
    process.kill()
    output, _ = process.communicate()
    assert process.returncode < 0, f"the run ended before the kill:\n{output}"
    return bool(writes(folder) - stale)


def writes(folder: Path) -> set[tuple]:
    """The unfinished checkpoints there are; one that is begun anew is another one."""
    found = set()
    for path in folder.glob("checkpoints/.step-*.partial"):
        try:
            found.add((path.name, path.stat().st_ino, path.stat().st_ctime_ns))
        except FileNotFoundError:  # it is finished
            continue
    return found


def logged(folder: Path, begun: float, steps: int) -> Callable[[], bool]:
    """Whether a process that began at a time has logged so many steps."""
    first = None

    def due() -> bool:
        nonlocal first
        file = folder / "metrics.csv"
        if not file.exists() or file.stat().st_mtime < begun:
            return False
        now = last_step(folder)
        first = now if first is None else first
        return now - first >= steps - 1

    return due


def last_step(folder: Path) -> int:
    """The last step in metrics.csv."""
    file = folder / "metrics.csv"
    whole = file.read_text().rpartition("\n")[0] if file.exists() else ""
    step = whole.rpartition("\n")[2].partition(",")[0]
    return int(step) if step.isdigit() else 0


def finish(process: subprocess.Popen) -> str:
    """Wait for a run that must succeed; its output."""
    output, _ = process.communicate()
    assert process.returncode == 0, output
    return output


if __name__ == "__main__":
    main(run)
