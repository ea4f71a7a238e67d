"""The progress of a run: a bar in a terminal, plain lines elsewhere."""

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta

import pytorch_lightning as pl
import rich.progress
from pytorch_lightning.callbacks import Callback
from rich.console import Console
from rich.text import Text


@dataclass
class Pace:
    """The speed of a run, by which the time left is estimated.

    Every time is in seconds of one clock. A step's seconds are the mean of the last 50 steps, with
    the time of checkpoints and without that of validations.

    Attributes:
        now: When the last step or validation ended.
        steps: Seconds of each of the last steps.
        validation: Seconds of the last validation.
    """

    now: float
    steps: deque[float] = field(default_factory=lambda: deque(maxlen=50))
    validation: float = 0.0

    def stepped(self, now: float) -> None:
        """Note that a step ended at `now`."""
        self.steps.append(now - self.now)
        self.now = now

    def validated(self, now: float) -> None:
        """Note that a validation, which began when the last step ended, ended at `now`."""
        self.validation, self.now = now - self.now, now

    @property
    def seconds(self) -> float:
        """The mean seconds of a step; infinite before the first."""
        return max(sum(self.steps) / len(self.steps), 1e-9) if self.steps else float("inf")

    def left(self, done: int, total: int, every: int) -> float:
        """Seconds until `total` steps are done, with the validations after each `every` steps."""
        return (total - done) * self.seconds + (total // every - done // every) * self.validation


class Progress(Callback):
    """The callback that shows step, losses, latest acceptance length, tokens/s and time left.

    It shows them on the first process. tokens/s counts the tokens that went into the network on
    all processes, with padding and the noisy copies of a token, and without the time of validation.

    Args:
        clock: Gives the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self.clock = clock

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Start the clock."""
        self.pace = Pace(self.clock())

    def on_train_batch_end(self, trainer, module, outputs, batch, index) -> None:
        """Show a step, once its last micro-batch is done."""
        if (index + 1) % trainer.accumulate_grad_batches == 0:
            forwards = trainer.accumulate_grad_batches * trainer.world_size
            self.tokens = module.tokens(batch) * forwards
            self.pace.stepped(self.clock())
            self._show(trainer)

    def on_validation_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Show what was measured."""
        self.pace.validated(self.clock())
        self._show(trainer, measured=True)

    def show(self, step: int, steps: int, figures: str, left: str, measured: bool) -> None:
        """Show the state after a step or, if something was measured, after its validation.

        Args:
            step: Steps done.
            steps: Steps of the run.
            figures: Rate, losses and acceptance lengths, as text.
            left: The time left, as text.
            measured: Whether a validation has just ended.
        """
        raise NotImplementedError

    def _show(self, trainer: pl.Trainer, measured: bool = False) -> None:
        if not trainer.is_global_zero or not self.pace.steps:
            return
        step, steps = trainer.global_step, trainer.max_steps
        every = trainer.val_check_batch // trainer.accumulate_grad_batches
        rate = f"{self.tokens / self.pace.seconds:,.0f} tokens/s"
        left = timedelta(seconds=round(self.pace.left(step, steps, every)))
        figures = "  ".join([rate, *formatted(trainer.callback_metrics)])
        self.show(step, steps, figures, f"{left} left", measured)


def formatted(metrics: dict) -> Iterator[str]:
    """'loss 3.210', 'val_loss 3.456' and 'acceptance length t0 2.10 t1 1.95', if they are known."""
    for name in ("loss", "val_loss"):
        if name in metrics:
            yield f"{name} {float(metrics[name]):.3f}"
    prefix = "acceptance_length_"
    lengths = sorted(name for name in metrics if name.startswith(prefix))
    if lengths:
        each = (f"{name.removeprefix(prefix)} {float(metrics[name]):.2f}" for name in lengths)
        yield f"acceptance length {' '.join(each)}"


class Lines(Progress):
    """Progress as plain lines: every few seconds, at the end, and after every validation.

    Args:
        seconds: Between two lines at least.
        clock: Gives the time in seconds.
    """

    def __init__(self, seconds: float = 10.0, clock: Callable[[], float] = time.perf_counter):
        super().__init__(clock)
        self.seconds, self.last = seconds, float("-inf")

    def show(self, step: int, steps: int, figures: str, left: str, measured: bool) -> None:
        """Print a line if the last one is old enough, and always at the end or a validation."""
        if measured or step == steps or self.pace.now - self.last >= self.seconds:
            self.last = self.pace.now
            print(f"step {step}/{steps}  {figures}  {left}", flush=True)


class Bar(Progress):
    """Progress as a bar, with the figures in a line below it: an 80-column terminal fits both.

    Args:
        console: Where it is drawn; None: the terminal.
        clock: Gives the time in seconds.
    """

    def __init__(
        self, console: Console | None = None, clock: Callable[[], float] = time.perf_counter
    ):
        super().__init__(clock)
        self.console, self.bar = console, None

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Draw the bar from the step that the run starts, or goes on, at."""
        super().on_train_start(trainer, module)
        if trainer.is_global_zero:
            self.bar = _BarAndLine(
                rich.progress.TextColumn("{task.description:10}"),
                rich.progress.BarColumn(),
                rich.progress.MofNCompleteColumn(),
                rich.progress.TextColumn("{task.fields[left]}"),
                console=self.console,
            )
            start = {"completed": trainer.global_step, "total": trainer.max_steps, "left": ""}
            self.task = self.bar.add_task("training", **start)
            self.bar.start()

    def on_validation_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Show that a validation runs, since the bar does not move meanwhile."""
        if self.bar is not None:
            self.bar.update(self.task, description="validating", refresh=True)

    def show(self, step: int, steps: int, figures: str, left: str, measured: bool) -> None:
        """Move the bar."""
        self.bar.figures = figures
        self.bar.update(self.task, completed=step, left=left, description="training")

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Leave the last state on the screen."""
        if self.bar is not None:
            self.bar.stop()

    def on_exception(self, trainer, module, exception) -> None:
        """Stop drawing, so that the error's message is readable."""
        self.on_train_end(trainer, module)


class _BarAndLine(rich.progress.Progress):
    figures = ""

    def get_renderables(self):
        yield from super().get_renderables()
        yield Text(self.figures)


def progress() -> Progress:
    """The progress callback for this output: a bar in a terminal, lines elsewhere."""
    return Bar() if sys.stdout.isatty() else Lines()
