"""Inputs of a recipe: built first at lab scale, named with their command elsewhere."""

import subprocess
import sys
from pathlib import Path

from omegaconf import DictConfig

from models.causal import looks_local


def prepare_inputs(config: DictConfig) -> None:
    """Every input that is a folder exists; at lab scale a missing one is built first.

    One that can be a Hub id is left to who loads it.
    """
    for need in config.needs:
        if Path(need.path).exists() or not looks_local(need.path):
            continue
        if not config.build_inputs:
            raise ValueError(f"{need.path} is missing. It is made by: {need.command}")
        print(f"{need.path} is missing, so it is built first: {need.command}", flush=True)
        arguments = need.command.split()[1:]
        if subprocess.run([sys.executable, *arguments]).returncode:
            raise ValueError(f"could not build {need.path} with: {need.command}")
