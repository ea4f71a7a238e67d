"""What watches a run: acceptance length, diverging losses, progress."""

import math
import sys
import time

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback, RichProgressBar

from decoding.params import SamplingParams
from decoding.samplers.base import Sampler
from trainers.checkpoints import Checkpoints
from trainers.strategies import whole_network


class AcceptanceLength(Callback):
    """Measures the real sampler on held-out prompts at every validation.

    Logs tokens emitted per target pass, the bonus or correction token included.
    """

    def __init__(self, prompts: list[list[int]], temperatures: list[float], max_new_tokens: int):
        self.prompts = prompts
        self.params = [
            SamplingParams(temperature=t, max_new_tokens=max_new_tokens, seed=0, ignore_eos=True)
            for t in temperatures
        ]

    @torch.compiler.set_stance("force_eager")  # every pass has another shape
    def on_validation_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Decode the prompts at every temperature."""
        if module.sampler() is None:
            return
        with whole_network(module) as here:
            lengths = self._measure(module.sampler()) if here else None
        # What is logged must be the same on every process: it decides what is kept.
        for name, length in trainer.strategy.broadcast(lengths).items():
            module.log(name, length, prog_bar=True)
        module.network.train()

    def _measure(self, sampler: Sampler) -> dict[str, float]:
        lengths = {}
        for params in self.params:
            drafted = params.temperature > 0 and "rejection" in sampler.rules
            verify = "rejection" if drafted else "coupled"
            params = SamplingParams(**{**vars(params), "verify": verify})
            emitted = [n for r in sampler.generate(self.prompts, params) for n in r.stats.emitted]
            lengths[f"acceptance_length_t{params.temperature:g}"] = sum(emitted) / len(emitted)
        return lengths


class LossGuard(Callback):
    """Stops a run whose loss is not finite, or diverges, with the last good checkpoint kept.

    factor: the smoothed loss may be so many times its best value. The loss of the first `wait`
    steps is not judged.
    """

    def __init__(self, factor: float, wait: int):
        self.factor, self.wait = factor, wait
        self.smooth, self.best = None, math.inf

    def on_train_batch_end(self, trainer, module, outputs, batch, index) -> None:
        """Judge the step's loss."""
        if "loss" not in trainer.callback_metrics:  # the first step is still accumulating
            return
        loss, step = float(trainer.callback_metrics["loss"]), trainer.global_step
        if not math.isfinite(loss):
            raise ValueError(f"the loss is {loss} at step {step}: {self._advice(trainer)}")
        self.smooth = loss if self.smooth is None else 0.95 * self.smooth + 0.05 * loss
        if step < self.wait:
            return
        self.best = min(self.best, self.smooth)
        if self.smooth > self.factor * self.best:
            raise ValueError(
                f"the loss diverges: {self.smooth:.3f} at step {step}, its best was "
                f"{self.best:.3f}. {self._advice(trainer)}"
            )

    def _advice(self, trainer: pl.Trainer) -> str:
        files = next(c for c in trainer.callbacks if isinstance(c, Checkpoints)).files()
        kept = f"the last checkpoint is {files[-1]}" if files else "there is no checkpoint yet"
        return f"lower optimization.lr (or the loss's weights, such as module.alpha); {kept}"


class Lines(Callback):
    """Progress where there is no terminal: a plain line now and then."""

    def __init__(self, seconds: float = 10.0):
        self.seconds, self.last = seconds, 0.0

    def on_train_start(self, trainer, module) -> None:
        """Start the clock."""
        self.started, self.first = time.perf_counter(), trainer.global_step

    def on_train_batch_end(self, trainer, module, outputs, batch, index) -> None:
        """Print a line if the last one is old enough."""
        now, step = time.perf_counter(), trainer.global_step
        if now - self.last < self.seconds and step < trainer.max_steps:
            return
        self.last = now
        rate = (step - self.first) / (now - self.started)
        left = (trainer.max_steps - step) / max(rate, 1e-9)
        shown = " ".join(
            f"{k}={float(v):.3f}"
            for k, v in trainer.callback_metrics.items()
            if k in ("loss", "val_loss") or k.startswith("acceptance_length")
        )
        print(f"step {step}/{trainer.max_steps} {shown} ({left:.0f} s left)", flush=True)


def progress() -> Callback:
    """A rich bar in a terminal, plain lines elsewhere."""
    return RichProgressBar(leave=True) if sys.stdout.isatty() else Lines()
