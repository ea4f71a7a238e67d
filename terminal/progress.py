"""Progress of work that a user waits for: a bar in a terminal, plain lines elsewhere.

Both go to stderr, since commands print their results to stdout. Work that ends within seconds
prints nothing, and neither does any process but the first of a run.
"""

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from datetime import timedelta
from threading import Event, Thread
from types import TracebackType
from typing import Self, TypeVar

Item = TypeVar("Item")
QUIET = 5.0  # seconds of work before anything is shown
LINES, FRAMES = 10.0, 0.5  # seconds between plain lines, and between two pictures of a bar
BAR = 20  # characters
RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID")  # variables with a process's number, by launchers
_open: list["Work"] = []  # the innermost is shown


class Work:
    """A context in which a user is told what is done, how much of it, and the time left.

    A thread tells it, so that it is seen within the first item too.

    Args:
        name: Of the work, such as 'packing'.
        total: Number of items; None where it is not known.
        unit: Of the items, in the plural; 'B' for bytes.
        poll: Returns a number of items to add to `done`, and a text such as a rate, when a line is
            shown; for work whose items are not counted one by one.
        clock: Seconds.

    Attributes:
        done: Number of items that are done, which `advance` or the caller raises.
    """

    def __init__(
        self,
        name: str,
        total: int | None = None,
        unit: str = "",
        poll: Callable[[], tuple[float, str]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.name, self.total, self.unit, self.poll, self.clock = name, total, unit, poll, clock
        self.done: float = 0
        self._last: float | None = None  # when it was shown
        self._ended = Event()

    def __enter__(self) -> Self:
        self._started, self._bar = self.clock(), sys.stderr.isatty()
        _open.append(self)
        self._thread = Thread(target=self._watch, daemon=True)
        if is_first():
            self._thread.start()
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()
        _open.remove(self)
        if self._last is None:
            return
        if self._bar:
            print("\r\x1b[K", end="", file=sys.stderr)
        if error is None:
            print(f"{self.name}: done in {self._passed()}", file=sys.stderr, flush=True)

    def advance(self, count: float = 1) -> None:
        """Count items that are done."""
        self.done += count

    def show(self) -> None:
        """Show the state, if it is time to."""
        now = self.clock()
        soon = LINES if self._last is not None and not self._bar else 0.0
        if now - self._started < QUIET or _open[-1] is not self:
            return
        if self._last is not None and now - self._last < soon:
            return
        self._last = now
        if self._bar:
            width = shutil.get_terminal_size().columns - 1
            print(f"\r{self._state()[:width]}\x1b[K", end="", file=sys.stderr, flush=True)
        else:
            print(self._state(), file=sys.stderr, flush=True)

    def _watch(self) -> None:
        if not self._ended.wait(QUIET):
            self.show()
            while not self._ended.wait(FRAMES):
                self.show()

    def _state(self) -> str:
        """Return 'packing: 30 of 90 texts, 0:00:20 left', or what of it is known."""
        more, told = self.poll() if self.poll else (0.0, "")
        done, passed = self.done + more, self.clock() - self._started
        parts = [self._amount(done)] if self.total or done else []
        parts += [told] if told else []
        if self.total and done:
            left = max(self.total - done, 0) * passed / done
            parts.append(f"{timedelta(seconds=round(left))} left")
        elif done:
            rate = done / passed
            pace = f"{rate:,.0f} a second" if rate >= 1 else f"{60 * rate:,.0f} a minute"
            parts.append(f"{pace}, {self._passed()} so far")
        else:
            parts.append(f"{self._passed()} so far")
        line = f"{self.name}: {', '.join(parts)}"
        if self._bar and self.total:
            full = min(int(BAR * done / self.total), BAR)
            line = f"{'█' * full}{'░' * (BAR - full)} {line}"
        return line

    def _amount(self, done: float) -> str:
        whole = [done] if self.total is None else [done, self.total]
        if self.unit == "B":
            return " of ".join(f"{n / 1e9:.1f}" for n in whole) + " GB"
        return f"{' of '.join(f'{int(n):,}' for n in whole)} {self.unit}".rstrip()

    def _passed(self) -> timedelta:
        return timedelta(seconds=round(self.clock() - self._started))


def track(
    items: Iterable[Item],
    name: str,
    total: int | None = None,
    unit: str = "",
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Item]:
    """Iterate over the items of a work; show how many are done and the time left (`Work`)."""
    if total is None and isinstance(items, Sized):
        total = len(items)
    with Work(name, total, unit, clock=clock) as work:
        for item in items:
            yield item
            work.advance()


def is_first() -> bool:
    """Return whether this process is alone, or the first of those of a launcher."""
    return all(os.environ.get(name, "0") == "0" for name in RANKS)
