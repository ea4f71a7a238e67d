"""Reload: a newer drafter takes the place of the one that is served, while requests are decoded."""

import logging
import threading
from collections.abc import Callable
from contextlib import suppress

from decoding.engine.sampler import Sampler
from decoding.serving.scheduler import Scheduler

log = logging.getLogger(__name__)


class Reload:
    """Loads an export again whenever it is asked to, in a thread that ends with it.

    A new one that cannot be served changes nothing, and is a line in the log.

    Args:
        scheduler: Decodes the requests.
        model: The name that clients call the export by.
        load: Returns the new sampler for the target of the old one, which it is given; it raises
            an exception where there is none.
    """

    def __init__(self, scheduler: Scheduler, model: str, load: Callable[[Sampler], Sampler]):
        self._scheduler, self._model, self._load = scheduler, model, load
        self._turn = threading.Lock()

    def ask(self) -> None:
        """Ask for one more load, which a signal's handler may do at any moment."""
        threading.Thread(target=self._replace, name="reload", daemon=True).start()

    def _replace(self) -> None:
        try:
            with self._turn:
                new = self._load(self._scheduler.samplers[self._model])
                self._scheduler.replace(self._model, new)
        except Exception as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            log.error("SIGHUP: %s is served as before: %s", self._model, reason)
        else:
            with suppress(OSError):  # the terminal is closed
                print(f"SIGHUP: {self._model} has the newer drafter from now on", flush=True)
