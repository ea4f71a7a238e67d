"""The callback that decides when checkpoints are written, which are kept, and what signals do."""

import math
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.utilities.rank_zero import rank_zero_only

from trainers.runs.checkpoint_files import (
    checkpoint_files,
    checkpoint_path,
    number_of,
    remove_checkpoint,
    write_checkpoint,
)
from trainers.runs.set_aside import drop_set_aside


class Preempted(Exception):
    """A run was asked to stop by a signal, and has written its checkpoint.

    Args:
        number: The signal's.
    """

    def __init__(self, number: int):
        super().__init__(signal.Signals(number).name)
        self.number = number


class Checkpoints(Callback):
    """The callback that writes checkpoints: at intervals, at the end, on signals.

    A checkpoint is written before a step's first forward: everything that the step before has
    logged and validated is on disk by then, so a resumed run's curve has neither gaps nor doubles.
    SIGTERM, SIGUSR1 and Ctrl-C ask for one and end the run.

    Args:
        folder: The folder of the checkpoints.
        every: Steps between two checkpoints.
        keep: How many of the last checkpoints are kept.
        best: How many are kept beside them, written after the validations with the best results
            so far (`measured`).

    Raises:
        ValueError: A number below its least value.
    """

    def __init__(self, folder: Path, every: int, keep: int, best: int = 0):
        for key, value, least in (
            ("checkpoint_every", every, 1),
            ("keep_last", keep, 1),
            ("keep_best", best, 0),
        ):
            if value < least:
                raise ValueError(f"trainer.{key}={value} must be at least {least}")
        self.folder, self.every, self.keep, self.best = folder, every, keep, best
        self.signal = 0
        self.first = 0  # the step that this process starts or goes on at
        self.found: dict[int, tuple[str, float]] = {}  # by step, the best first: see `measured`

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Replace Lightning's signal handlers, set just before, by one that notes a signal."""
        self.first = trainer.global_step
        self.found = {s: v for s, v in self.found.items() if self._path(s).exists()}
        lightning = trainer._signal_connector
        if lightning.received_sigterm:  # while the run was set up; it would exit with status 0
            self.signal, lightning.received_sigterm = signal.SIGTERM, False
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, self._note)

    def on_train_batch_start(self, trainer, module, batch, index) -> None:
        """Save between two steps if one is due or a signal came.

        Raises:
            Preempted: After a signal, on every process in the same step.
        """
        step = trainer.global_step
        if index % trainer.accumulate_grad_batches:
            return
        # The ranks may hear of a signal in different steps; they stop in the same one, with the
        # same exit status.
        heard = torch.tensor(int(self.signal), device=trainer.strategy.root_device)
        number = int(trainer.strategy.reduce(heard, reduce_op="max"))
        if step and (number or step % self.every == 0 or step in self.found):
            self.save(trainer)
        if number:
            raise Preempted(number)

    def on_validation_end(self, trainer, module) -> None:
        """Note a result that is among the best; the next save writes its weights."""
        now = trainer.strategy.broadcast(measured(trainer.callback_metrics))
        if math.isfinite(now[1]):
            found = {**self.found, trainer.global_step: now}
            order = sorted(found, key=lambda step: better(*found[step]), reverse=True)
            self.found = {step: found[step] for step in order[: self.best]}

    def on_train_end(self, trainer, module) -> None:
        """Save the last step, unless the run ended early: Lightning would not go on alike."""
        if trainer.global_step < trainer.max_steps:
            return
        self.save(trainer)
        if self.found and trainer.is_global_zero:
            step, (name, value) = next(iter(self.found.items()))
            print(f"best checkpoint: {self._path(step)} ({name} {value:.4g})")

    def save(self, trainer: pl.Trainer) -> None:
        """Write the checkpoint of this step, atomically, and remove those not to be kept."""
        if trainer.global_step > self.first:  # else it is the one that the run goes on from
            with _between_batches(trainer):
                write_checkpoint(trainer, self._path(trainer.global_step))
            self._drop(trainer.global_step)

    def on_save_checkpoint(self, trainer, module, checkpoint: dict) -> None:
        """Add what a resumed run must know of this one."""
        checkpoint["run"] = {
            "processes": trainer.world_size,
            "accumulate": trainer.accumulate_grad_batches,
            "found": self.found,
        }

    def on_load_checkpoint(self, trainer, module, checkpoint: dict) -> None:
        """Restore it; on another number of processes say that the run is no longer bit for bit."""
        now = {"processes": trainer.world_size, "accumulate": trainer.accumulate_grad_batches}
        before = checkpoint.get("run", {**now, "found": {}})
        self.found = before["found"]
        if any(before[key] != now[key] for key in now) and trainer.is_global_zero:
            print(
                f"going on with {now['processes']} processes x {now['accumulate']} forwards a "
                f"step, after {before['processes']} x {before['accumulate']}: the same data in the "
                "same steps, but sums are rounded and dropout is drawn otherwise: no longer bit "
                "for bit"
            )
        # Lightning counts forwards, and a step may have another number of them now.
        counted = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
        for counts in (counted["total"], counted["current"]):
            for key in counts:
                counts[key] = counts[key] // before["accumulate"] * now["accumulate"]

    def files(self) -> list[Path]:
        """The checkpoints on disk, oldest step first."""
        return checkpoint_files(self.folder)

    def _path(self, step: int) -> Path:
        return checkpoint_path(self.folder, step)

    @rank_zero_only
    def _drop(self, step: int) -> None:
        drop_set_aside(self.folder.parent)
        for path in self.files():
            if number_of(path) > step:  # a copy of an earlier step, which the run began from
                remove_checkpoint(path)
        best = {self._path(step) for step in self.found}
        for path in self.files()[: -self.keep]:
            if path not in best:
                remove_checkpoint(path)

    def _note(self, number: int, frame) -> None:
        self.signal = number
        if number == signal.SIGINT:  # a second Ctrl-C does not wait for the step
            signal.signal(number, signal.default_int_handler)


def measured(metrics: dict) -> tuple[str, float]:
    """The metric by which a run's checkpoints are compared, and its value at this validation.

    Args:
        metrics: The latest value of every metric.

    Returns:
        (name, value): the acceptance length at the lowest temperature; for a run that measures
        none, the validation loss; nan without either.
    """
    lengths = sorted(name for name in metrics if name.startswith("acceptance_length"))
    name = lengths[0] if lengths else "val_loss"
    return name, float(metrics.get(name, math.nan))


def better(name: str, value: float) -> float:
    """A sort key for a metric's value: greater is better."""
    return -value if name == "val_loss" else value


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
