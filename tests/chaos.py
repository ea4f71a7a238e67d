"""A run that is killed again and again ends as the run that was left alone, bit for bit.

`python -m tests.chaos [kills=10] [seed=0]`: a run of tiny networks, with dropout, is killed with
SIGKILL at random moments, at least two of them in the midst of a checkpoint's write, and resumed
each time by the same command. Status 1 if weights or metrics.csv differ from the undisturbed run's.
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

from decoding.commands.cli import main, parse
from tests.support.lab import Lab
from tests.support.runs import same_run

RUN = ("deer_stage2", "trainer.max_steps=400", "trainer.checkpoint_every=10", "trainer.log_every=1",
       "trainer.validate_every=40")  # fmt: skip
IN_WRITE = 2  # kills that must cut a checkpoint's write


@dataclass(frozen=True)
class Chaos:
    """Kill a run `kills` times at moments drawn with `seed`, and compare how it ends."""

    kills: int = 10
    seed: int = 0


def run(argv: list[str]) -> None:
    """The command."""
    c = parse(argv or ["kills=10"], Chaos, "tests.chaos")
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as root:
        lab = prepared(Path(root))
        runs = lab.runs / RUN[0]
        finish(lab.start(*RUN, "name=left_alone"))
        draw, in_write = random.Random(c.seed), 0
        for number in range(1, c.kills + 1):
            steps = None if in_write < IN_WRITE and number % 2 == 0 else draw.randint(1, 40)
            cut = kill(lab.start(*RUN, "name=killed"), runs / "killed", steps)
            in_write += cut
            at = "in a write" if steps is None else f"after {steps} steps"
            print(f"kill {number}: {at}; metrics until step {last_step(runs / 'killed')}; "
                  f"a write was {'cut' if cut else 'not cut'}", flush=True)  # fmt: skip
        finish(lab.start(*RUN, "name=killed"))
        same = same_run(runs / "left_alone", runs / "killed")
    print(f"{c.kills} kills, {in_write} of them in the midst of a checkpoint's write")
    print(
        f"weights bit for bit and metrics.csv byte for byte: {'same' if same else 'NOT the same'}"
    )
    print(f"{time.perf_counter() - started:.0f} s")
    sys.exit(0 if same and in_write >= IN_WRITE else 1)


def prepared(root: Path) -> Lab:
    """What the run needs: tiny networks that draw dropout while they train."""
    lab = Lab(root)
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        lab.fit("ar_target", "+network.attention_dropout=0.1")
        lab.fit("diffusion_adapt")
        lab.collect()
        lab.fit("deer_stage1")
    return lab


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
