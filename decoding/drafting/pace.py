"""Whether drafts pay, as measured while requests are decoded.

What a pass costs depends on the machine and on how many requests share it, and what drafts bring on
the texts. Where the noise is keyed a text is the same with drafts and without, so a server may
change its mind in any cycle: it does what gave more tokens a second, and tries the other now and
then.
"""

from collections.abc import Sequence
from dataclasses import dataclass

TRIAL = 4  # cycles in a row; the first one is not counted: a drafter may have to catch up
SOON, LATE = 100, 400  # cycles until the slower way is tried again: nearly as fast, and others
NEARLY = 1.3  # times as fast
HOPELESS = 2  # times as slow: a trial ends
MEMORY = 0.95  # weight of what was measured, a cycle later


@dataclass
class Rate:
    """Tokens and seconds of a way, weighted by how recent they are."""

    tokens: float = 0.0
    seconds: float = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """Add a cycle's."""
        self.tokens = MEMORY * self.tokens + tokens
        self.seconds = MEMORY * self.seconds + seconds

    @property
    def known(self) -> bool:
        """Return whether anything was measured."""
        return self.seconds > 0

    @property
    def speed(self) -> float:
        """Return the tokens a second."""
        return self.tokens / self.seconds


class Course:
    """The way of requests that are alike.

    Args:
        ways: What there is to choose from, two, and what is taken first.
        until: Cycles until the other's turn.
    """

    def __init__(self, ways: Sequence[str], first: str, until: int = TRIAL):
        self.way, self._rates = first, {way: Rate() for way in ways}
        self._taken, self._until = 0, until  # cycles with this way, and until the other's turn

    def add(self, way: str, tokens: int, seconds: float) -> None:
        """Note a cycle, and choose the next one's way."""
        if way != self.way:
            return
        self._taken += 1
        if self._taken > 1:
            self._rates[way].add(tokens, seconds)
        (other,) = self._rates.keys() - {way}
        tried = self._until == TRIAL and self._rates[way].known and self._rates[other].known
        lost = tried and HOPELESS * self._rates[way].speed < self._rates[other].speed
        if self._taken < self._until and not lost:
            return
        if not self._rates[other].known or self._until != TRIAL:
            self._turn(other, TRIAL)  # a trial of the other
            return
        best = max(self._rates, key=lambda name: self._rates[name].speed)
        slower = min(rate.speed for rate in self._rates.values())
        near = self._rates[best].speed < NEARLY * slower
        self._turn(best, SOON if near else LATE)

    @property
    def plain(self) -> bool:
        """Return whether drafts were found not to pay."""
        return self.way == "plain" and all(rate.known for rate in self._rates.values())

    def _turn(self, way: str, cycles: int) -> None:
        self._taken = 0 if way != self.way else 1
        self.way, self._until = way, cycles


class Pace:
    """The ways of all kinds of requests."""

    def __init__(self) -> None:
        self._courses: dict[tuple, Course] = {}

    def course(self, requests: int, kind: tuple, ways: Sequence[str], first: str) -> Course:
        """Return the course of so many requests of a kind, to the next power of two.

        Drafts that do not pay for fewer requests are not tried soon for more: a wider pass costs
        more, and so does a trial.
        """
        size, of = max(requests - 1, 0).bit_length(), (*kind, *ways)
        if (size, *of) not in self._courses:
            fewer = (self._courses.get((n, *of)) for n in range(size))
            hopeless = first == "plain" or any(
                course is not None and course.plain for course in fewer
            )
            new = Course(ways, "plain", LATE) if hopeless else Course(ways, first)
            self._courses[size, *of] = new
        return self._courses[size, *of]
