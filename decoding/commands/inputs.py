"""Inputs of a recipe: built first at lab scale, elsewhere required."""

import shlex
import subprocess
import sys
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from models.causal import looks_local


def prepare_inputs(config: DictConfig) -> None:
    """Make sure that every input folder exists; at lab scale a missing one is built first.

    An input that can be a Hub id is left to the code that loads it.

    Args:
        config: A composed recipe; its `needs` has a path and a command for each input.

    Raises:
        ValueError: An input is missing and may not be built (`build_inputs`), or its command fails.
    """
    for need in config.needs:
        if {*need} != {"path", "command"}:
            raise ValueError(f"needs={config.needs} is not allowed: each has a path and a command")
        if Path(need.path).exists() or not looks_local(need.path):
            continue
        # Split before keys are filled in: a folder's name may have spaces.
        words = OmegaConf.to_container(need, resolve=False)["command"].split()
        words = [*OmegaConf.create(words, parent=config)]
        command = shlex.join(words)
        if not config.build_inputs:
            raise ValueError(f"{need.path} is missing. It is made by: {command}")
        print(f"{need.path} is missing, so it is built first: {command}", flush=True)
        if subprocess.run([sys.executable, *words[1:]]).returncode:
            raise ValueError(f"could not build {need.path} with: {command}")
