"""The state of the process that a test must leave as it found it: any other may come next."""

import os
import random
import signal
import sys

import numpy
import torch

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


def process_state() -> dict[str, object]:
    """What a test can leave behind for the next one, by name.

    Warnings' filters are not in it: pytest restores them.
    """
    # scikit-learn sets KMP_*, of OpenMP, when it is first imported, lm-eval HF_XET_*.
    passing = ("PYTEST_CURRENT_TEST", "KMP_", "HF_XET_HIGH_PERFORMANCE")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(passing)}
    return {
        **{f"os.environ[{k!r}]": v for k, v in environment.items()},
        **{s.name: signal.getsignal(s) for s in SIGNALS},
        "working directory": os.getcwd(),
        "sys.path": [*sys.path],
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "threads": torch.get_num_threads(),
        "gradients": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "process group": torch.distributed.is_initialized(),
    }


def changed(before: dict[str, object], after: dict[str, object]) -> list[str]:
    """The names of what differs."""
    names = before.keys() | after.keys()
    return sorted(n for n in names if before.get(n) != after.get(n))


def seed_everything(seed: int = 0) -> None:
    """The generators that a test may draw from without a seed of its own."""
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
