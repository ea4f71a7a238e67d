"""Runs that are killed with SIGKILL at a chosen moment."""

import subprocess
import time
from collections.abc import Callable
from pathlib import Path


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
