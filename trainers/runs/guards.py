"""The errors that stop a run and say in one line what to do: a diverged loss, no memory left."""

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytorch_lightning as pl
import torch
from omegaconf import DictConfig, OmegaConf
from pytorch_lightning.callbacks import Callback

from trainers.runs.checkpoint_files import checkpoint_files
from trainers.runs.checkpoints import Checkpoints

# Messages of the libraries when there is no memory left, in lower case.
NO_MEMORY = ("out of memory", "allocate memory", "not enough memory", "status_alloc_failed")


class LossGuard(Callback):
    """The callback that stops a run whose loss diverges or is not finite.

    The last good checkpoint is kept: a step is checked before the next one's checkpoint is written,
    and weights that are not finite (a finite loss can have such gradients) are never written.

    Args:
        factor: Maximum ratio of the smoothed loss to its best value. Where that is small or
            negative (a density's loss can be), the loss may exceed it by at most `factor - 1`
            quarters of the way from the first step's loss to the best value.
        wait: Steps at the start whose loss only has to be finite.
    """

    def __init__(self, factor: float, wait: int):
        self.factor, self.wait = factor, wait
        self.first: float | None = None
        self.smooth: float | None = None
        self.best = math.inf

    def state_dict(self) -> dict:
        return {"first": self.first, "smooth": self.smooth, "best": self.best}

    def load_state_dict(self, state: dict) -> None:
        self.first, self.smooth, self.best = state["first"], state["smooth"], state["best"]

    def on_train_batch_end(self, trainer, module, outputs, batch, index) -> None:
        """Raise ValueError, after a step's last micro-batch, for a loss that went wrong."""
        if (index + 1) % trainer.accumulate_grad_batches:
            return
        loss, step = float(trainer.callback_metrics["loss"]), trainer.global_step
        if not math.isfinite(loss):
            raise ValueError(f"the loss is {loss} {advice(trainer)}")
        if self.first is None or self.smooth is None:
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
        """Raise ValueError on every process if weights of one, to be written, are not finite."""
        weights = (p for network in module.trained.values() for p in network.parameters())
        local = [p.to_local() if hasattr(p, "to_local") else p for p in weights]
        local = [getattr(p, "ds_tensor", p) for p in local]  # ZeRO-3's share
        finite = bool(torch.stack([p.isfinite().all().cpu() for p in local]).all())
        if not trainer.strategy.reduce_boolean_decision(finite):
            raise ValueError(f"the weights are not finite after the update {advice(trainer)}")


def advice(trainer: pl.Trainer) -> str:
    """Say where a run went wrong, what to lower and which checkpoint is kept."""
    step, loader = trainer.global_step, trainer.train_dataloader.loader
    samples = loader.batch_sampler.samples(step - 1)
    rows = [loader.dataset.row_of(n) for n in samples]
    folder = getattr(loader.dataset.rows, "folder", "the training set")
    callback = next(c for c in trainer.callbacks if isinstance(c, Checkpoints))
    files = checkpoint_files(callback.folder)
    kept = f"the last checkpoint is {files[-1]}" if files else "there is no checkpoint yet"
    return (
        f"at step {step}, on samples {samples[0]} to {samples[-1]} (rows {rows} of {folder}): "
        f"look at them, or lower optimization.lr (or the loss's weights, such as module.alpha); "
        f"{kept}"
    )


@contextmanager
def memory_advice(config: DictConfig) -> Iterator[None]:
    """Where a library gets no memory in the block, name the settings that need less."""
    try:
        yield
    except Exception as error:
        if text := memory_error(error):
            raise ValueError(less_memory(text, config)) from error
        raise


def memory_error(error: BaseException | None) -> str | None:
    """Return the message of the library that got no memory; None for another reason."""
    while error is not None:
        text = str(error) or type(error).__name__
        if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
            isinstance(error, (RuntimeError, OSError))
            and any(sign in text.lower() for sign in NO_MEMORY)
        ):
            return text
        error = error.__cause__
    return None


def less_memory(text: str, config: DictConfig) -> str:
    """Name the settings that need less memory, the harmless first, for a library's message."""
    t = config.trainer
    device = "GPU" if re.search("cuda|hip", text, re.IGNORECASE) else "CPU"
    found = re.search(r"tried to allocate ([\d.]+ \w+)", text, re.IGNORECASE)
    asked = f", which was asked for {found[1]}" if found else ""
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
    keys = ("data.train.length", "data.corruption.anchors")
    values = {key: OmegaConf.select(config, key) for key in keys}
    if sizes := [f"{key}={value}" for key, value in values.items() if value is not None]:
        ways.append(f"lower {' or '.join(sizes)}, which changes what is trained")
    return f"no memory is left on the {device}{asked}. In this order: {'; '.join(ways)}"
