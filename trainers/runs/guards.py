"""The errors that stop a run and say in one line what to do: a diverged loss, no memory left."""

import functools
import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import pytorch_lightning as pl
import torch
from omegaconf import DictConfig, OmegaConf
from pytorch_lightning.callbacks import Callback
from torch import Tensor

from trainers.runs.checkpoints import Checkpoints

# What the libraries say when there is no memory left, in lower case.
NO_MEMORY = ("out of memory", "allocate memory", "not enough memory", "status_alloc_failed")


class LossGuard(Callback):
    """The callback that stops a run whose loss diverges or is not finite.

    The last good checkpoint is kept: a step is checked before the next one's checkpoint is written,
    and weights that are not finite (a finite loss can have such gradients) are never written. The
    message names the step's data.

    Args:
        factor: The smoothed loss may be at most `factor` times its best value. Where the best
            value is small or negative (a density's loss can be), it may exceed it by at most
            `factor - 1` quarters of the way from the first step's loss to the best value.
        wait: Steps at the start whose loss only has to be finite.
    """

    def __init__(self, factor: float, wait: int):
        self.factor, self.wait = factor, wait
        self.first, self.smooth, self.best = None, None, math.inf

    def state_dict(self) -> dict:
        """The state by which a resumed run decides as the uninterrupted one does."""
        return {"first": self.first, "smooth": self.smooth, "best": self.best}

    def load_state_dict(self, state: dict) -> None:
        # Checkpoints of before there was a first loss: the best one alone is the measure.
        self.first = state.get("first", state["best"])
        self.smooth, self.best = state["smooth"], state["best"]

    def on_train_batch_end(self, trainer, module, outputs, batch, index) -> None:
        """Check a step's loss, once its last micro-batch is done.

        Raises:
            ValueError: The loss is not finite, or diverges.
        """
        if (index + 1) % trainer.accumulate_grad_batches:
            return
        loss, step = float(trainer.callback_metrics["loss"]), trainer.global_step
        if not math.isfinite(loss):
            raise ValueError(f"the loss is {loss} {advice(trainer)}")
        if self.smooth is None:
            self.first = self.smooth = loss
        self.smooth = 0.95 * self.smooth + 0.05 * loss
        if step < self.wait:
            return
        self.best = min(self.best, self.smooth)
        unit = max(self.best, (self.first - self.best) / 4)
        if self.smooth > self.best + (self.factor - 1) * unit:
            raise ValueError(
                f"the loss diverges: smoothed it is {self.smooth:.3f}, its best was "
                f"{self.best:.3f}, {advice(trainer)}"
            )

    def on_save_checkpoint(self, trainer: pl.Trainer, module, checkpoint) -> None:
        """Check the weights that are about to be written.

        Raises:
            ValueError: On every process, if weights of one are not finite.
        """
        finite = all_finite(module.network.parameters())
        if not trainer.strategy.reduce_boolean_decision(finite):
            raise ValueError(f"the weights are not finite after the update {advice(trainer)}")


def all_finite(parameters: Iterable[Tensor]) -> bool:
    """Whether all of this process's weights are finite numbers."""
    local = [p.to_local() if hasattr(p, "to_local") else p for p in parameters]
    return bool(torch.stack([p.isfinite().all().cpu() for p in local]).all())


def advice(trainer: pl.Trainer) -> str:
    """The end of a message: where a run went wrong, what to lower and which checkpoint is kept."""
    step, loader = trainer.global_step, trainer.train_dataloader.loader
    samples = loader.batch_sampler.samples(step - 1)
    rows = [loader.dataset.row_of(n) for n in samples]
    folder = getattr(loader.dataset.rows, "folder", "the training set")
    files = next(c for c in trainer.callbacks if isinstance(c, Checkpoints)).files()
    kept = f"the last checkpoint is {files[-1]}" if files else "there is no checkpoint yet"
    return (
        f"at step {step}, on samples {samples[0]} to {samples[-1]} (rows {rows} of {folder}): "
        f"look at them, or lower optimization.lr (or the loss's weights, such as module.alpha); "
        f"{kept}"
    )


def with_memory_advice(fit: Callable[[DictConfig], Path]) -> Callable[[DictConfig], Path]:
    """A decorator of `fit` that answers a lack of memory with the settings that need less.

    Args:
        fit: A function of the composed recipe.

    Returns:
        The same function; it raises ValueError where a library gets no memory.
    """

    @functools.wraps(fit)
    def advised(config: DictConfig) -> Path:
        try:
            return fit(config)
        except Exception as error:
            text = memory_error(error)
            if text is None:
                raise
            raise ValueError(memory_advice(text, config)) from error

    return advised


def memory_error(error: BaseException | None) -> str | None:
    """The message of the library that got no memory; None if an error has another reason."""
    while error is not None:
        text = str(error)
        if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
            isinstance(error, (RuntimeError, OSError))
            and any(sign in text.lower() for sign in NO_MEMORY)
        ):
            return text
        error = error.__cause__
    return None


def memory_advice(text: str, config: DictConfig) -> str:
    """One line on the settings that need less memory, with their values, the harmless ones first.

    Args:
        text: The library's message; it tells a GPU from the CPU, and how much was asked for.
        config: The composed recipe.

    Returns:
        The line.
    """
    t, s = config.trainer, OmegaConf.select
    device = "GPU" if re.search("cuda|hip", text, re.IGNORECASE) else "CPU"
    asked = re.search(r"tried to allocate ([\d.]+ \w+)", text, re.IGNORECASE)
    asked = f", which was asked for {asked[1]}" if asked else ""
    ways = []
    if t.micro_batch_size > 1:
        ways.append(
            f"lower trainer.micro_batch_size={t.micro_batch_size} (trainer.batch_size="
            f"{t.batch_size} stays, so the result does not change)"
        )
    if not t.checkpoint_activations:
        ways.append("set trainer.checkpoint_activations=true")
    if device == "GPU" and "offload" not in config.strategy:
        sharded = config.strategy in ("fsdp2", "deepspeed_3")
        other = f"{config.strategy}_offload" if sharded else "fsdp2 or strategy=deepspeed_3"
        ways.append(f"take strategy={other} (now {config.strategy}, trainer.devices={t.devices})")
    if config.target is not None and config.acceptance.prompts:
        ways.append(
            "set acceptance.prompts=0, which leaves the target out of memory unless the loss "
            "reads it"
        )
    sizes = [
        f"{key}={s(config, key)}"
        for key in ("data.train.length", "data.corruption.anchors")
        if s(config, key) is not None
    ]
    if sizes:
        ways.append(f"lower {' or '.join(sizes)}, which changes what is trained")
    return f"no memory is left on the {device}{asked}. In this order: {'; '.join(ways)}"
