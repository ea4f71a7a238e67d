"""Checkpoints: when they are written, which are kept, and what a signal does."""

import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytorch_lightning as pl
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.utilities.rank_zero import rank_zero_only


class Preempted(Exception):
    """A run was asked to stop, and has written its checkpoint. number: the signal's."""

    def __init__(self, number: int):
        super().__init__(signal.Signals(number).name)
        self.number = number


class Checkpoints(Callback):
    """A checkpoint every so many steps and on SIGTERM and SIGUSR1 (pre-emption, requeue).

    Written before a step's first forward: all that the step before has logged and validated is on
    disk by then, so a resumed run's curve has neither gaps nor doubles. keep: how many stay.
    """

    def __init__(self, folder: Path, every: int, keep: int):
        self.folder, self.every, self.keep, self.signal = folder, every, keep, 0
        self.first = 0  # the step that this process starts or goes on at

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Take the signals over (from Lightning, which has just set its own); only note them."""
        self.first = trainer.global_step
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._note)

    def on_train_batch_start(self, trainer, module, batch, index) -> None:
        """Between two steps: save if it is time or a signal came."""
        step = trainer.global_step
        if index % trainer.accumulate_grad_batches:
            return
        # The ranks may hear of a signal in different steps; they stop in the same one.
        stop = trainer.strategy.reduce_boolean_decision(bool(self.signal), all=False)
        if step and (stop or step % self.every == 0):
            self.save(trainer)
        if stop:
            raise Preempted(self.signal or signal.SIGTERM)

    def save(self, trainer: pl.Trainer) -> None:
        """Write the checkpoint of this step, atomically, and drop the oldest ones."""
        if trainer.global_step > self.first:  # else it is the one that the run goes on from
            with _between_batches(trainer):
                trainer.save_checkpoint(self.folder / f"step-{trainer.global_step}.ckpt")
            self._drop()

    def files(self) -> list[Path]:
        """The checkpoints there are, oldest step first."""
        return checkpoint_files(self.folder)

    @rank_zero_only
    def _drop(self) -> None:
        for file in self.files()[: -self.keep]:
            file.unlink()

    def _note(self, number: int, frame) -> None:
        self.signal = number


@contextmanager
def _between_batches(trainer: pl.Trainer) -> Iterator[None]:
    """Lightning has counted the batch that is about to start; a checkpoint must not."""
    progress = trainer.fit_loop.epoch_loop.batch_progress
    counted = progress.current.ready - progress.current.completed
    for count in (progress.total, progress.current):
        count.ready -= counted
    yield
    for count in (progress.total, progress.current):
        count.ready += counted


def checkpoint_files(folder: Path) -> list[Path]:
    """The checkpoints in a folder, oldest step first."""
    steps = {f: re.fullmatch(r"step-(\d+)", f.stem) for f in folder.glob("*.ckpt")}
    return sorted((f for f, m in steps.items() if m), key=lambda f: int(steps[f][1]))
