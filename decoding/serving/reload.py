"""Reload: a newer drafter takes the place of the one that is served, while requests are decoded."""

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue

from decoding.engine.sampler import Sampler
from decoding.serving.scheduler import Scheduler

log = logging.getLogger(__name__)


class Reload:
    """A thread that loads an export again whenever it is asked to.

    A new one that cannot be served changes nothing, and is a line in the log.

    Args:
        scheduler: Decodes the requests.
        model: The name that clients call the export by.
        load: Returns the new sampler for the target of the old one, which it is given; it raises
            an exception where there is none.
    """

    def __init__(self, scheduler: Scheduler, model: str, load: Callable[[Sampler], Sampler]):
        self._scheduler, self._model, self._load = scheduler, model, load
        self._asked: SimpleQueue[None] = SimpleQueue()
        threading.Thread(target=self._run, name="reload", daemon=True).start()

    def ask(self) -> None:
        """Ask for one more load, which a signal's handler may do at any moment."""
        self._asked.put(None)

    def _run(self) -> None:
        while True:
            self._asked.get()
            self._replace()

    def _replace(self) -> None:
        try:
            new = self._load(self._scheduler.samplers[self._model])
            self._scheduler.replace(self._model, new)
        except Exception as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            log.error("SIGHUP: %s is served as before: %s", self._model, reason)
        else:
            with suppress(OSError):  # the terminal is closed
                print(f"SIGHUP: {self._model} has the newer drafter from now on", flush=True)
