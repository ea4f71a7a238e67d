"""The check of what a checkpoint restores beside weights: it has the form that a run saves.

Lightning and torch take the states of loops, schedules and optimizers as they come, and fail where
they are used.
"""

from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning import LightningModule
from torch import Tensor

from data.files import shortened
from trainers.runs.safe_load import read_file

LARGEST = 1e300  # larger integers are no floats


def check_restorable(trainer: pl.Trainer, module: LightningModule, path: Path) -> None:
    """Raise ValueError unless a checkpoint that is a file restores a run like this one.

    Its weights and its step are checked elsewhere (`trainers.runs.checkpoint_files`).
    """
    module.trainer = trainer
    found = read_file(path)
    try:
        for key, own in _own(trainer, module, found).items():
            _check(key, found.get(key), own)
    except ValueError as error:
        raise ValueError(
            f"the checkpoint {path} is damaged or of another version ({error}): give another one "
            "with resume=, or start anew with resume=never"
        ) from None


def _own(trainer: pl.Trainer, module: LightningModule, found: dict) -> dict[str, Any]:
    """Return what this run would save, by key; of states by step or process as many as found."""
    optimizers, schedulers = module.configure_optimizers()
    states = found.get("random_states")
    run = {"processes": 1, "accumulate": 1, "found": {}}
    if isinstance(found.get("run"), dict) and isinstance(found["run"].get("found"), dict):
        run["found"] = dict.fromkeys(found["run"]["found"], ("", 0.0))
    callbacks = {c.state_key: c.state_dict() for c in trainer.callbacks}
    known = found.get("callbacks")
    return {
        "pytorch-lightning_version": "",
        "epoch": 0,
        "callbacks": {k: s for k, s in callbacks.items() if isinstance(known, dict) and k in known},
        "loops": {"fit_loop": trainer.fit_loop.state_dict()},
        "optimizer_states": [_filled(o, found) for o in optimizers],
        "lr_schedulers": [s["scheduler"].state_dict() for s in schedulers],
        "run": run,
        "random_states": len(states if isinstance(states, list) else [0])
        * [{"torch": torch.get_rng_state()}],
    }


def _filled(optimizer: torch.optim.Optimizer, found: dict) -> dict[str, Any]:
    """Return AdamW's state after a step, with none for weights that had none in the checkpoint."""
    state = optimizer.state_dict()
    try:
        known = found["optimizer_states"][0]["state"].keys()
    except (AttributeError, IndexError, KeyError, TypeError):
        known = ()
    weights = [p for group in optimizer.param_groups for p in group["params"]]
    moments = [{"step": torch.tensor(0.0), "exp_avg": p, "exp_avg_sq": p} for p in weights]
    state["state"] = {i: own for i, own in enumerate(moments) if i in known}
    return state


def _check(where: str, found: Any, own: Any) -> None:
    """Raise ValueError unless a value has the form of the run's own, with all of its keys."""
    if isinstance(own, Tensor):
        fits = isinstance(found, Tensor) and found.shape == own.shape
        fits = fits and (found.dtype == own.dtype or found.dtype.is_floating_point)
    elif isinstance(own, dict):
        fits = isinstance(found, dict)
    elif isinstance(own, (list, tuple)):
        fits = isinstance(found, (list, tuple)) and len(found) == len(own)
        fits = fits and (not where.endswith(".params") or list(found) == list(own))
    elif isinstance(own, str):
        fits = isinstance(found, str)
    else:  # a number, or none yet
        numbers = isinstance(found, (int, float)) and not LARGEST < abs(found) < float("inf")
        fits = numbers or (own is None and found is None)
    if not fits:
        shown = type(found).__name__ if not isinstance(found, (int, float)) else shortened(found)
        raise ValueError(f"its {where} is {shown}")
    if isinstance(own, dict):
        for key, value in own.items():
            if key not in found:
                raise ValueError(f"its {where} has no {key!r}")
            _check(f"{where}.{key}", found[key], value)
    elif isinstance(own, (list, tuple)):
        for i, value in enumerate(own):
            _check(f"{where}.{i}", found[i], value)
