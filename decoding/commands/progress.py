"""Progress of a long job: a bar in a terminal, a plain line now and then elsewhere."""

import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from time import perf_counter
from typing import TypeVar

Item = TypeVar("Item")
SECONDS = 10.0  # between plain lines


def track(
    items: Sequence[Item], name: str, clock: Callable[[], float] = perf_counter
) -> Iterator[Item]:
    """Iterate over items, and show how many are done and the time left.

    Args:
        items: A sequence.
        name: Of the job.
        clock: Returns seconds; plain lines use it.

    Returns:
        An iterator over the items.
    """
    return _bar(items, name) if sys.stdout.isatty() else _lines(items, name, clock)


def _bar(items: Sequence[Item], name: str) -> Iterator[Item]:
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    )  # fmt: skip
    with Progress(*columns) as progress:
        yield from progress.track(items, description=name)


def _lines(items: Sequence[Item], name: str, clock: Callable[[], float]) -> Iterator[Item]:
    started = last = clock()
    for done, item in enumerate(items, 1):
        yield item
        now = clock()
        if now - last >= SECONDS:
            left = timedelta(seconds=round((now - started) / done * (len(items) - done)))
            print(f"{name}: {done} of {len(items)}, {left} left", flush=True)
            last = now
