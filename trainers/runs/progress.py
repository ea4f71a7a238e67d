"""The progress of a run: a bar in a terminal, plain lines elsewhere."""

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta

import pytorch_lightning as pl
import rich.progress
from pytorch_lightning.callbacks import Callback
from rich.console import Console
from rich.text import Text

from terminal.progress import Work


class Progress(Callback):
    """The callback that shows step, losses, latest acceptance length, tokens/s and time left.

    tokens/s is a mean over 50 steps: tokens into the network on all processes, with padding and
    noisy copies; time includes checkpoints, not validations. A `console` gets a bar (None: standard
    output, if it is a terminal). Otherwise lines are printed at least `seconds` apart, at the end
    and after every validation.
    """

    def __init__(
        self,
        console: Console | None = None,
        seconds: float = 10.0,
        clock: Callable[[], float] = time.perf_counter,
    ):
        if console is None and sys.stdout.isatty():
            console = Console()
        self.console, self.seconds, self.clock = console, seconds, clock
        self.bar: _BarAndLine | None = None
        self.last_line = float("-inf")
        self.steps: deque[float] = deque(maxlen=50)  # seconds of each
        self.validation = 0.0  # seconds of the last one
        self.begun, self.waiting = False, ExitStack()

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Start the clock, and draw the bar from the step that the run resumes at."""
        self.now = self.clock()  # when the last step or validation ended
        if trainer.is_global_zero and self.console is not None:
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

    def on_train_batch_start(self, trainer, module, batch, index) -> None:
        """Say that the first step goes on: it compiles a network that is to be compiled."""
        if not self.begun:
            self.begun = True
            self._wait("the first step")

    def on_train_batch_end(self, trainer, module, outputs, batch, index) -> None:
        if (index + 1) % trainer.accumulate_grad_batches == 0:
            forwards = trainer.accumulate_grad_batches * trainer.world_size
            self.waiting.close()
            self.tokens = module.tokens(batch) * forwards
            self.steps.append(self._passed())
            self._show(trainer)

    def on_validation_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Show that a validation runs, since the bar does not move meanwhile."""
        self._wait("validation")
        if self.bar is not None:
            self.bar.update(self.task, description="validating", refresh=True)

    def on_validation_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.waiting.close()
        self.validation = self._passed()
        self._show(trainer, measured=not module.interrupted)

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.waiting.close()
        if self.bar is not None:
            self.bar.stop()

    def on_exception(self, trainer, module, exception) -> None:
        """Stop drawing, so that the error's message is readable."""
        self.on_train_end(trainer, module)

    def _wait(self, name: str) -> None:
        """Say what goes on, where no bar does."""
        if self.bar is None:
            self.waiting.enter_context(Work(name))

    def _passed(self) -> float:
        before, self.now = self.now, self.clock()
        return self.now - before

    def _left(self, done: int, total: int, every: int) -> float:
        """Return the seconds until `total` steps, with validations after each `every` steps."""
        validations = total // every - done // every
        return (total - done) * self._seconds() + validations * self.validation

    def _seconds(self) -> float:
        return max(sum(self.steps) / len(self.steps), 1e-9)

    def _show(self, trainer: pl.Trainer, measured: bool = False) -> None:
        if not trainer.is_global_zero or not self.steps:
            return
        step, steps = trainer.global_step, trainer.max_steps
        every = trainer.val_check_batch // trainer.accumulate_grad_batches
        rate = f"{self.tokens / self._seconds():,.0f} tokens/s"
        left = f"{timedelta(seconds=round(self._left(step, steps, every)))} left"
        figures = "  ".join([rate, *_formatted(trainer.callback_metrics)])
        if self.bar is not None:
            self.bar.figures = figures
            self.bar.update(self.task, completed=step, left=left, description="training")
        elif measured or step == steps or self.now - self.last_line >= self.seconds:
            self.last_line = self.now
            print(f"step {step}/{steps}  {figures}  {left}", flush=True)


def _formatted(metrics: dict) -> Iterator[str]:
    """Yield 'loss 3.210', 'val_loss 3.456', 'acceptance length t0 2.10 t1 1.95', where known."""
    for name in ("loss", "val_loss"):
        if name in metrics:
            yield f"{name} {float(metrics[name]):.3f}"
    prefix = "acceptance_length_"
    lengths = sorted(name for name in metrics if name.startswith(prefix))
    if lengths:
        each = (f"{name.removeprefix(prefix)} {float(metrics[name]):.2f}" for name in lengths)
        yield f"acceptance length {' '.join(each)}"


class _BarAndLine(rich.progress.Progress):
    """A bar with the figures in a line below it: an 80-column terminal fits both."""

    figures = ""

    def get_renderables(self):
        yield from super().get_renderables()
        yield Text(self.figures)
