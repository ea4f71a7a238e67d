"""Where a run came from: kept beside its weights and in its model card."""

import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import torch

PACKAGES = ("torch", "transformers", "tokenizers", "pytorch-lightning", "datasets", "hydra-core")


def provenance() -> dict:
    """Command line, git commit, package versions, hardware."""
    return {
        "command": " ".join(["python -m trainers.fit", *sys.argv[1:]]),
        "git_commit": _git("rev-parse", "HEAD"),
        "git_dirty": bool(_git("status", "--porcelain")),
        "packages": {name: metadata.version(name) for name in PACKAGES},
        "python": platform.python_version(),
        "hardware": {
            "processor": platform.processor() or platform.machine(),
            "threads": torch.get_num_threads(),
            "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        },
    }


def _git(*arguments: str) -> str | None:
    here = Path(__file__).parent
    done = subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None
