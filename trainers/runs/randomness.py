"""The callback that keeps the random states of every process in the checkpoint (for dropout)."""

import random

import numpy as np
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback

State = dict[str, torch.Tensor | tuple]


class RandomStates(Callback):
    """The callback that gives every process numbers of its own, and a resumed one the same ones.

    The order of the data and its noise need no state, in data loader workers neither: they are
    counter-based (data/rows/stream.py). On another number of processes the draws begin anew.
    """

    def __init__(self):
        self.restored: State | None = None

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Set another seed for each process and start: all had one seed, for equal weights."""
        first = trainer.global_step * trainer.world_size
        torch.manual_seed(torch.initial_seed() + first + trainer.global_rank)

    def on_train_batch_start(self, trainer, module, batch, index) -> None:
        """Restore the checkpoint's state here: setting up the run has drawn numbers too."""
        if self.restored is not None:
            restore(self.restored, trainer.strategy.root_device)
            self.restored = None

    def on_save_checkpoint(self, trainer, module, checkpoint: dict) -> None:
        """Add the states of all processes; every process must call."""
        states = [state(trainer.strategy.root_device)]
        if trainer.world_size > 1:
            mine, states = states[0], [None] * trainer.world_size
            torch.distributed.all_gather_object(states, mine)
        checkpoint["random_states"] = states

    def on_load_checkpoint(self, trainer, module, checkpoint: dict) -> None:
        """Take this process's own state, if the number of processes is unchanged."""
        states = checkpoint.get("random_states", [])
        if len(states) == trainer.world_size:
            self.restored = states[trainer.global_rank]


def state(device: torch.device) -> State:
    """The states of Python's, numpy's and torch's generators, in types that any load allows."""
    kind, keys, *rest = np.random.get_state()
    found = {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(keys.astype("int64")), *rest),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(device)
    return found


def restore(found: State, device: torch.device) -> None:
    """Set the states that `state` returned.

    Args:
        found: The states.
        device: The process's; a GPU has a generator of its own.
    """
    random.setstate(found["python"])
    kind, keys, *rest = found["numpy"]
    np.random.set_state((kind, keys.numpy().astype("uint32"), *rest))
    torch.set_rng_state(found["torch"].cpu())
    if device.type == "cuda" and "cuda" in found:
        torch.cuda.set_rng_state(found["cuda"].cpu(), device)
