"""One process at a time in a run's folder."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

LOCK = ".lock"  # held by a process that works on the folder it is in

RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID")  # what launchers call a process's number


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Lock a folder, created if missing, against other commands; remove it at the end if empty.

    The system frees a killed process's lock. With torchrun or srun the first process holds it.
    """
    if any(int(os.environ.get(name, 0)) for name in RANKS):
        yield
        return
    made = [p for p in (folder, *folder.parents) if not p.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / LOCK)
        lock.acquire(timeout=0)
    except Timeout:
        raise ValueError(
            f"another process works on {folder}: wait for its end, or give another name=..."
        ) from None
    except OSError as error:
        raise ValueError(
            f"cannot write into the folder {folder} ({error.strerror}): choose another one with "
            "runs=..."
        ) from error
    try:
        yield
    finally:
        lock.release()
        if made and [p.name for p in folder.iterdir()] == [LOCK]:
            (folder / LOCK).unlink()
            with suppress(OSError):  # a folder above may hold inputs that were built
                for path in made:
                    path.rmdir()
