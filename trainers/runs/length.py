"""The length of a run in minutes: its steps and validations, by the seconds that they take here."""

import math
import time
from dataclasses import dataclass

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback

SKIPPED, TIMED = 2, 4  # steps: the first ones compile, fill caches and reserve memory
FEW = 2  # validations of a run, so that there is a best one, where they take at most
SHARE = 0.2  # of its time


@dataclass
class Seconds:
    """The seconds that a step, a validation and a checkpoint take, and those before the run."""

    step: float
    validation: float
    checkpoint: float
    before: float


class Stopwatch(Callback):
    """The first callback of a run of `SKIPPED` + `TIMED` steps, which times what it does."""

    def __init__(self):
        self.start = self.validated = time.perf_counter()
        self.steps: list[float] = []  # when each ended

    def on_train_batch_end(self, trainer: pl.Trainer, module, outputs, batch, index) -> None:
        """Note when a step has ended, before its validation."""
        if (index + 1) % trainer.accumulate_grad_batches == 0:
            if (device := trainer.strategy.root_device).type == "cuda":
                torch.cuda.synchronize(device)
            self.steps.append(time.perf_counter())

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Note when the validation has ended; the checkpoint of the last step comes next."""
        self.validated = time.perf_counter()

    def seconds(self, began: float, built: float) -> Seconds:
        """Return what was found, when the run has ended.

        Args:
            began: When the command began, and with it its minutes, by `time.perf_counter`.
            built: When the building of the run began, which the run itself needs once more.
        """
        now, (*_, last) = time.perf_counter(), self.steps
        step = (last - self.steps[SKIPPED - 1]) / TIMED
        before = now - began + self.start - built
        return Seconds(step, self.validated - last, now - self.validated, before)


def plan(
    minutes: float, found: Seconds, validate_every: int, checkpoint_every: int
) -> tuple[int, int]:
    """Return the steps of a run of `minutes`, and how many steps there are to a validation.

    The minutes hold the steps, the validations, the checkpoints, and all that came before.
    A run has at least `FEW` validations, or one where they would take more than a `SHARE` of it.
    The intervals `validate_every` and `checkpoint_every` hold as in any run.

    Raises:
        ValueError: For a run that is too short for the steps that were measured.
    """
    left = 60 * minutes - found.before - found.checkpoint
    step = found.step + found.checkpoint / checkpoint_every
    checks = FEW if FEW * found.validation <= SHARE * left else 1
    steps = (left - checks * found.validation) / step
    if steps > checks * validate_every:
        steps = left / (step + found.validation / validate_every)
        checks = math.ceil(steps / validate_every)
    least = SKIPPED + TIMED
    if steps < least:
        needed = found.before + found.checkpoint + found.validation + least * step
        raise ValueError(
            f"minutes={minutes:g} is too short: here a step takes {found.step:.2g} s, a validation "
            f"{found.validation:.2g} s, and {found.before:.2g} s go before: give minutes="
            f"{math.ceil(needed / 6) / 10:g} at the least, or trainer.max_steps="
        )
    return int(steps), math.ceil(int(steps) / checks)
