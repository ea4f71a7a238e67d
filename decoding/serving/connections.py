"""Connections: bounded in number, and closed if their client keeps the server waiting."""

from asyncio import TimerHandle
from collections.abc import Callable

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

PATIENCE = 30  # seconds for a client to send a request, or to read on
HURRY = 5  # the same when the server ends
DISCARDED = 2**28  # bytes that a client may go on sending after its request was refused
CHUNKS, SHORT = 512, 64  # more chunks of a body than this have so many bytes each on average
LEAST = 2**16  # bytes that a client reads in PATIENCE seconds to be waited for further


class Parser(h11.Connection):
    """A parser that refuses a body in many tiny chunks: each takes the event loop's time."""

    def next_event(self):
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._chunks = self._bytes = 0
        elif isinstance(event, h11.Data):
            self._chunks, self._bytes = self._chunks + 1, self._bytes + len(event.data)
            if self._chunks > CHUNKS and self._bytes < SHORT * self._chunks:
                raise h11.RemoteProtocolError("the body comes in too many small chunks")
        return event


class Connection(H11Protocol):
    """A client's connection.

    While the server waits for its client, be it for a request, for a body or for room to write on,
    a clock runs. After `PATIENCE` seconds the connection is closed. If there are more than `most`,
    the one that has waited longest is closed, first of all those that ask for nothing.
    """

    def __init__(self, *args, most: int, **options):
        super().__init__(*args, **options)
        self.conn, self._most, self._patience = Parser(h11.SERVER), most, PATIENCE
        self._waits: tuple | None = None  # what for
        self._since = 0.0
        self._timer: TimerHandle | None = None
        self._unread = self._pauses = self._discarded = 0
        self._begun = False  # the next request

    def connection_made(self, transport) -> None:
        super().connection_made(transport)
        self._look()
        if len(self.connections) > self._most:
            others = [c for c in self.connections if isinstance(c, Connection) and c is not self]
            others = [c for c in others if c._waits and not c.transport.is_closing()]
            rank = lambda c: (c._waits[0] != "request", c._since)  # noqa: E731
            min(others, key=rank, default=self).transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        if self._asks_nothing:
            self._begun = True
            self._discarded += len(data)
            if self._discarded > DISCARDED:
                self.transport.abort()
                return
        super().data_received(data)
        self._look()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        self._begun, self._discarded = False, 0
        super().on_response_complete()
        self._look()

    def pause_writing(self) -> None:
        self._pauses += 1
        super().pause_writing()
        self._look()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._look()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP, and close the connection."""
        try:
            super().send_400_response(msg)
        except h11.LocalProtocolError:  # an answer has begun
            self.transport.abort()

    def shutdown(self) -> None:
        """Close the connection, after the answer that is being given, if any."""
        if self._asks_nothing:
            self.transport.close()  # what was written is still sent
        else:
            self.cycle.keep_alive = False
        self._patience, self._waits = HURRY, None
        self._look()

    @property
    def _asks_nothing(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _look(self) -> None:
        """Set the clock where the server begins to wait for something else, or for nothing."""
        waits: tuple | None = None
        if self._asks_nothing:
            waits = "request", self.cycle, self._begun
        elif self.cycle.more_body:
            waits = "body", self.cycle
        elif self.flow.write_paused:
            waits = "reading", self._pauses
        if waits != self._waits:
            self._waits, self._since = waits, self.loop.time()
            self._set()

    def _set(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._unread = self.transport.get_write_buffer_size()
        if self._waits is None:
            self._timer = None
            return
        # A route that reads a body answers one that is late itself.
        patience = self._patience + HURRY * (self._waits[0] == "body")
        self._timer = self.loop.call_later(patience, self._give_up)

    def _give_up(self) -> None:
        if self.transport.get_write_buffer_size() <= self._unread - LEAST:
            self._set()  # it reads slowly
        else:
            self.transport.abort()


class Http(uvicorn.Server):
    """A server that calls a function when it begins to end."""

    def __init__(self, config: uvicorn.Config, end: Callable[[], None]):
        super().__init__(config)
        self._end = end

    async def shutdown(self, sockets=None) -> None:
        """End, as uvicorn does."""
        self._end()
        await super().shutdown(sockets)


def room(wanted: int) -> tuple[int, int]:
    """Return how many connections fit into the files that this process may open, and a backlog.

    As many as the backlog are accepted in one go, several times before the first one is closed.
    """
    try:
        import resource
    except ImportError:  # Windows
        return wanted, 128
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    spare = max(16, most - 64) if most != resource.RLIM_INFINITY else 4 * wanted
    return min(wanted, spare // 2), max(1, min(128, spare // 8))
