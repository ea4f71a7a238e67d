"""Inputs of a recipe: built first at lab scale, required elsewhere."""

import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from models.causal import looks_local


def prepare_inputs(needs: Sequence[DictConfig], build: bool) -> None:
    """Check that every input in `needs` (path and command) exists; with `build`, run its command.

    Inputs that can be Hub ids are left to the code that loads them.
    """
    for need in needs:
        if {*need} != {"path", "command"}:
            raise ValueError(f"needs={needs} is not allowed: each has a path and a command")
        if Path(need.path).exists() or not looks_local(need.path):
            continue
        # Split before keys are filled in: a folder's name may have spaces.
        words = OmegaConf.to_container(need, resolve=False)["command"].split()
        words = [*OmegaConf.create(words, parent=need._get_root())]
        command = shlex.join(words)
        if not build:
            raise ValueError(f"{need.path} is missing. It is made by: {command}")
        print(f"{need.path} is missing, so it is built first: {command}", flush=True)
        if subprocess.run([sys.executable, *words[1:]]).returncode:
            raise ValueError(f"could not build {need.path} with: {command}")
