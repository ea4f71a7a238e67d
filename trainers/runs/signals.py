"""The callback that hears the signals which ask a run to stop: SIGTERM, SIGUSR1 and Ctrl-C."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback


class Preempted(Exception):
    """The end of a run that a signal has stopped, after its checkpoint."""

    def __init__(self, number: int):
        super().__init__(signal.Signals(number).name)
        self.number = number


class Interrupted(Exception):
    """The end of a measurement that a signal has cut short."""


class Signals(Callback):
    """The callback that notes signals, and cuts short the validation in which one comes.

    Training stops between two steps (`Checkpoints`). A validation may take minutes, and a scheduler
    waits for seconds: the rest of it is skipped, nothing of it is logged, and the run goes on with
    the whole of it. It belongs behind the callbacks that take part in a validation.

    Attributes:
        number: The last signal that this process has heard; 0 before.
        steps: Those of the whole run, once it goes on from a checkpoint.
    """

    def __init__(self):
        self.number = self.steps = 0
        self._raises = False

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Replace Lightning's signal handlers, set just before; run a validation that is owed."""
        lightning = trainer._signal_connector
        if lightning.received_sigterm:  # while the run was set up; it would exit with status 0
            self.number, lightning.received_sigterm = signal.SIGTERM, False
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, self._note)
        if module.interrupted:
            trainer.fit_loop.epoch_loop.max_steps = self.steps
            loop = trainer.fit_loop.epoch_loop.val_loop
            loop.restarting = False
            trainer.validating = True
            loop.run()
            trainer.training = True

    def on_validation_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Begin to validate as if no validation had been cut short."""
        module.interrupted = False

    def on_validation_batch_start(self, trainer, module, batch, index, dataloader_idx=0) -> None:
        """Skip the rest of a validation on all processes once one of them has heard a signal."""
        module.interrupted = module.interrupted or self.agreed(trainer) > 0

    def on_save_checkpoint(self, trainer, module, checkpoint: dict) -> None:
        checkpoint["run"]["interrupted"] = module.interrupted

    def on_load_checkpoint(self, trainer, module, checkpoint: dict) -> None:
        """Note a validation that is owed, and let Lightning start a run that owes nothing else."""
        module.interrupted = bool(checkpoint["run"].get("interrupted"))
        self.steps = trainer.max_steps
        if module.interrupted and checkpoint["global_step"] == trainer.max_steps:
            trainer.fit_loop.epoch_loop.max_steps += 1  # until `on_train_start`; no step is made

    def agreed(self, trainer: pl.Trainer) -> int:
        """Return a signal that any process has heard, else 0; every process must call.

        Processes may hear of it at different times. They stop in one place, with one exit status.
        """
        heard = torch.tensor(int(self.number), device=trainer.strategy.root_device)
        return int(trainer.strategy.reduce(heard, reduce_op="max"))

    @contextmanager
    def raising(self) -> Iterator[None]:
        """Raise Interrupted at once within a context when a signal comes, or has come."""
        self._raises = True
        try:
            if self.number:
                raise Interrupted
            yield
        finally:
            self._raises = False

    def _note(self, number: int, frame) -> None:
        self.number = number
        if number == signal.SIGINT:  # a second Ctrl-C does not wait for the step
            signal.signal(number, signal.default_int_handler)
        if self._raises:
            self._raises = False
            raise Interrupted
