"""The callback that decides when checkpoints are written and kept."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytorch_lightning as pl
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.utilities.rank_zero import rank_zero_only

from trainers.runs.checkpoint_files import (
    checkpoint_files,
    number_of,
    remove_checkpoint,
    write_checkpoint,
)
from trainers.runs.set_aside import drop_set_aside
from trainers.runs.signals import Preempted, Signals


class Checkpoints(Callback):
    """The callback that writes checkpoints: at intervals, at the end, on signals, which end a run.

    Each is written before a step's first forward: everything that the step before has logged and
    validated is on disk by then, so a resumed run's curve has neither gaps nor doubles.

    Args:
        folder: The folder of the checkpoints.
        signals: Hears the signals.
        every: Steps between two checkpoints.
        keep: How many of the last checkpoints are kept.
        best: How many more are kept, of those after the best validations so far (`measured`).
    """

    def __init__(self, folder: Path, signals: Signals, every: int, keep: int, best: int = 0):
        self.folder, self.signals = folder, signals
        self.every, self.keep, self.best = every, keep, best
        self.first = 0  # the step that this process starts or goes on at
        self.found: dict[int, tuple[str, float]] = {}  # by step, the best first: see `measured`

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.first = trainer.global_step
        self.found = {s: v for s, v in self.found.items() if self._path(s).exists()}

    def on_train_batch_start(self, trainer, module, batch, index) -> None:
        """Save between two steps if one is due or a signal came, which raises Preempted."""
        step = trainer.global_step
        if index % trainer.accumulate_grad_batches:
            return
        number = self.signals.agreed(trainer)
        if step and (number or step % self.every == 0 or step in self.found):
            self.save(trainer)
        if number:
            raise Preempted(number)

    def on_validation_end(self, trainer, module) -> None:
        """Note a result that is among the best; the next save writes its weights."""
        if module.interrupted:
            return
        now = trainer.strategy.broadcast(measured(trainer.callback_metrics))
        if math.isfinite(now[1]):
            found = {**self.found, trainer.global_step: now}
            order = sorted(found, key=lambda step: _better(*found[step]), reverse=True)
            self.found = {step: found[step] for step in order[: self.best]}

    def on_train_end(self, trainer, module) -> None:
        """Save the last step; a run that ended early could not resume alike in Lightning."""
        if trainer.global_step < trainer.max_steps:
            return
        self.save(trainer)
        if module.interrupted:
            raise Preempted(self.signals.agreed(trainer))
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
        checkpoint["run"] = {
            "processes": trainer.world_size,
            "accumulate": trainer.accumulate_grad_batches,
            "found": self.found,
        }

    def on_load_checkpoint(self, trainer, module, checkpoint: dict) -> None:
        """Restore the best; say if another number of processes rules out bit-equal results."""
        now = {"processes": trainer.world_size, "accumulate": trainer.accumulate_grad_batches}
        before = checkpoint["run"]
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

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step}.ckpt"

    @rank_zero_only
    def _drop(self, step: int) -> None:
        drop_set_aside(self.folder.parent)
        for path in checkpoint_files(self.folder):
            if number_of(path) > step:  # a copy of an earlier step, which the run began from
                remove_checkpoint(path)
        best = {self._path(step) for step in self.found}
        for path in checkpoint_files(self.folder)[: -self.keep]:
            if path not in best:
                remove_checkpoint(path)


def measured(metrics: dict) -> tuple[str, float]:
    """Return (name, value) of the metric to rank checkpoints by; nan if there is none."""
    lengths = sorted(name for name in metrics if name.startswith("acceptance_length"))
    name = lengths[0] if lengths else "val_loss"
    return name, float(metrics.get(name, math.nan))


def _better(name: str, value: float) -> float:
    """Return a sort key for a metric's value: greater is better."""
    return -value if name == "val_loss" else value


@contextmanager
def _between_batches(trainer: pl.Trainer) -> Iterator[None]:
    """Uncount the batch that is about to start: Lightning has counted it, a checkpoint must not."""
    progress = trainer.fit_loop.epoch_loop.batch_progress
    counted = progress.current.ready - progress.current.completed
    for count in (progress.total, progress.current):
        count.ready -= counted
    yield
    for count in (progress.total, progress.current):
        count.ready += counted
