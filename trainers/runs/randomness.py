"""The callback that keeps the random states of every process in the checkpoint (for dropout)."""

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback


class RandomStates(Callback):
    """The callback that gives each process its own random numbers, the same after a resume.

    Dropout draws from torch's generators. They belong to the steps alone: whatever looks between
    two steps (a validation, acceptance lengths, a checkpoint) may draw, and changes nothing. The
    data's order and noise need no state: they are counter-based (data/rows/stream.py). On another
    number of processes the draws begin anew.
    """

    def __init__(self):
        self.kept: dict[str, torch.Tensor] | None = None  # of the end of the last step

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Set another seed for each process and start: all had one seed, for equal weights."""
        first = trainer.global_step * trainer.world_size
        torch.manual_seed(torch.initial_seed() + first + trainer.global_rank)

    def on_train_batch_start(self, trainer, module, batch, index) -> None:
        """Go on from the end of the last step, or of the checkpoint's."""
        if self.kept is not None:
            torch.set_rng_state(self.kept["torch"].cpu())
            device = trainer.strategy.root_device
            if device.type == "cuda" and "cuda" in self.kept:
                torch.cuda.set_rng_state(self.kept["cuda"].cpu(), device)

    def on_train_batch_end(self, trainer, module, outputs, batch, index) -> None:
        """Keep the state of this process."""
        self.kept, device = {"torch": torch.get_rng_state()}, trainer.strategy.root_device
        if device.type == "cuda":  # a GPU has a generator of its own
            self.kept["cuda"] = torch.cuda.get_rng_state(device)

    def on_save_checkpoint(self, trainer, module, checkpoint: dict) -> None:
        """Add the states of all processes; every process must call, after a step."""
        states: list[dict | None] = [self.kept]
        if trainer.world_size > 1:
            states = [None] * trainer.world_size
            torch.distributed.all_gather_object(states, self.kept)
        checkpoint["random_states"] = states

    def on_load_checkpoint(self, trainer, module, checkpoint: dict) -> None:
        """Take this process's own state, if the number of processes is unchanged."""
        states = checkpoint["random_states"]
        if len(states) == trainer.world_size:
            self.kept = states[trainer.global_rank]
