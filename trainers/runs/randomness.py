"""The random states of every process, in the checkpoint: what dropout draws from."""

import random

import numpy as np
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback

State = dict[str, torch.Tensor | tuple]


class RandomStates(Callback):
    """Every process draws its own numbers, and a resumed one goes on with them.

    The order of the data and its noise need no state, in data loader workers neither: they are
    counter-based (data/rows/stream.py). On another number of processes the draws begin anew.
    """

    def __init__(self):
        self.restored: State | None = None

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Another seed for each process and start: all were seeded alike, for equal weights."""
        first = trainer.global_step * trainer.world_size
        torch.manual_seed(torch.initial_seed() + first + trainer.global_rank)

    def on_train_batch_start(self, trainer, module, batch, index) -> None:
        """Go on where the checkpoint was written: setting up the run has drawn numbers too."""
        if self.restored is not None:
            restore(self.restored, trainer.strategy.root_device)
            self.restored = None

    def on_save_checkpoint(self, trainer, module, checkpoint: dict) -> None:
        """Gather the states of all processes; every process must call."""
        states = [state(trainer.strategy.root_device)]
        if trainer.world_size > 1:
            mine, states = states[0], [None] * trainer.world_size
            torch.distributed.all_gather_object(states, mine)
        checkpoint["random_states"] = states

    def on_load_checkpoint(self, trainer, module, checkpoint: dict) -> None:
        """Take this process's own state, if there are as many processes as there were."""
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
    """Set what `state` has found."""
    random.setstate(found["python"])
    kind, keys, *rest = found["numpy"]
    np.random.set_state((kind, keys.numpy().astype("uint32"), *rest))
    torch.set_rng_state(found["torch"].cpu())
    if device.type == "cuda" and "cuda" in found:
        torch.cuda.set_rng_state(found["cuda"].cpu(), device)
