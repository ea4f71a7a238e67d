"""The length of a run in minutes: its steps and validations, by the seconds that they take here.

A short run is timed, with a validation of few rows and one prompt; from it follow the steps, the
interval of validations, and how many rows and prompts a validation has.
"""

import math
import time
from dataclasses import dataclass
from typing import NamedTuple

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback

SKIPPED, TIMED = 2, 4  # steps: the first ones compile, fill caches and reserve memory
FEW = 2  # validations of a run at the least, so that there is a best one: they take at most
SHARE = 0.2  # of its time, with fewer rows and prompts if need be


@dataclass
class Seconds:
    """The seconds of a step, a row and a prompt of a validation, and a checkpoint.

    `before` are those that pass before the run's first step.
    """

    step: float
    row: float
    prompt: float
    checkpoint: float
    before: float


class Plan(NamedTuple):
    """The length of a run: its steps, and a validation's interval, rows, prompts and seconds."""

    steps: int
    every: int
    rows: int
    prompts: int
    validation: float


class Stopwatch(Callback):
    """The first callback of a run of `SKIPPED` + `TIMED` steps, which times what it does."""

    def __init__(self):
        self.start = self.read = self.validated = time.perf_counter()
        self.steps: list[float] = []  # when each ended

    def on_train_batch_end(self, trainer: pl.Trainer, module, outputs, batch, index) -> None:
        """Note when a step has ended, before its validation."""
        if (index + 1) % trainer.accumulate_grad_batches == 0:
            if (device := trainer.strategy.root_device).type == "cuda":
                torch.cuda.synchronize(device)
            self.steps.append(time.perf_counter())

    def on_validation_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Note when the rows have been read; the prompts come next."""
        self.read = time.perf_counter()

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Note when the validation has ended; the checkpoint of the last step comes next."""
        self.validated = time.perf_counter()

    def seconds(self, rows: int, prompts: int, began: float, built: float) -> Seconds:
        """Return what was found, when the run has ended.

        Args:
            rows, prompts: Of its validation.
            began: When the command began, and with it its minutes, by `time.perf_counter`.
            built: When the building of the run began, which the run itself needs once more.
        """
        now, (*_, last) = time.perf_counter(), self.steps
        step = (last - self.steps[SKIPPED - 1]) / TIMED
        before = now - began + self.start - built
        row, prompt = (self.read - last) / rows, (self.validated - self.read) / max(prompts, 1)
        return Seconds(step, row, prompt, now - self.validated, before)


def plan(
    minutes: float,
    found: Seconds,
    validate_every: int,
    checkpoint_every: int,
    rows: int,
    prompts: int,
) -> Plan:
    """Return the plan of a run of `minutes`.

    The minutes hold the steps, the validations, the checkpoints, and all that came before. A run
    has at least `FEW` validations of `rows` and `prompts`, or of as many of them as take a `SHARE`
    of it; one where even a row and a prompt take more. The intervals `validate_every` and
    `checkpoint_every` hold as in any run.

    Raises:
        ValueError: For a run that is too short for the steps that were measured.
    """
    left = 60 * minutes - found.before - found.checkpoint
    step = found.step + found.checkpoint / checkpoint_every
    most, asked = SHARE * left / FEW, rows * found.row + prompts * found.prompt
    if asked > most:
        rows, prompts = (min(n, max(1, int(n * most / asked))) for n in (rows, prompts))
    validation = rows * found.row + prompts * found.prompt
    checks = FEW if FEW * validation <= SHARE * left else 1
    steps = (left - checks * validation) / step
    if steps > checks * validate_every:
        steps = left / (step + validation / validate_every)
        checks = math.ceil(steps / validate_every)
    least = SKIPPED + TIMED
    if steps < least:
        needed = found.before + found.checkpoint + validation + least * step
        raise ValueError(
            f"minutes={minutes:g} is too short: here a step takes {found.step:.2g} s, a validation "
            f"{validation:.2g} s, and {found.before:.0f} s go before: give minutes="
            f"{math.ceil(needed / 6) / 10:g} at the least, or trainer.max_steps="
        )
    return Plan(int(steps), math.ceil(int(steps) / checks), rows, prompts, validation)
