"""Runs one after another in the same processes, which are started as torchrun starts them.

Lightning and our own code refuse DeepSpeed without CUDA. This module lifts their four checks, and
DS_ACCELERATOR=cpu makes ZeRO run on the CPU, over gloo. One start serves many runs, as it takes
longer than a run of a tiny network. A run's first argument may be `stop=N`: SIGTERM after step N.
"""

import contextlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path

import torch
from deepspeed.comm.torch import TorchBackend
from pytorch_lightning import Callback
from pytorch_lightning.strategies import DDPStrategy, DeepSpeedStrategy
from pytorch_lightning.strategies import deepspeed as lightnings

from recipes.compose import compose
from trainers import fit


@dataclass
class Ran:
    """A run's result: it has the first process's output, error (None: it ended well) and norms."""

    output: str
    error: str | None
    norms: list[float]


def run_all(runs: list[list[str]], processes: int, folder: Path, **environment) -> list[Ran]:
    """Train with lists of arguments, one after another, in so many processes of one start."""
    folder.mkdir()
    (folder / "runs.json").write_text(json.dumps(runs))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = []
    for rank in range(processes):
        torchrun = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "GROUP_RANK": 0,
                    "LOCAL_WORLD_SIZE": processes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
                    "TORCHELASTIC_RUN_ID": "tests", "OMP_NUM_THREADS": 1,
                    "DS_ACCELERATOR": "cpu"}  # fmt: skip
        env = {**os.environ, **{k: str(v) for k, v in {**torchrun, **environment}.items()}}
        command = [sys.executable, "-m", "tests.support.ranks", folder]
        with (folder / f"{rank}.log").open("w") as log:
            started.append(subprocess.Popen(command, env=env, stdout=log, stderr=log))
    for rank, process in enumerate(started):
        status = process.wait(timeout=600)
        assert status == 0, (folder / f"{rank}.log").read_text()
    return [Ran(**json.loads(line)) for line in (folder / "ran.json").read_text().splitlines()]


class Norms(Callback):
    """The callback that keeps the norm of every step's gradient, before it is clipped."""

    found: list[float] = []
    stop: int | None = None

    def on_before_optimizer_step(self, trainer, module, optimizer):
        if not isinstance(trainer.strategy, DeepSpeedStrategy):
            grads = [p.grad for p in module.parameters() if p.grad is not None]
            norm = torch.nn.utils.get_total_norm(grads)
            self.found.append(float(getattr(norm, "full_tensor", lambda: norm)()))

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        if isinstance(trainer.strategy, DeepSpeedStrategy) and (
            (index + 1) % trainer.accumulate_grad_batches == 0
        ):
            self.found.append(float(trainer.strategy.deepspeed_engine.get_global_grad_norm()))
        if trainer.global_step == self.stop and trainer.is_global_zero:
            signal.raise_signal(signal.SIGTERM)


def lift_checks() -> None:
    """Let DeepSpeed's strategy run on the CPU."""
    DeepSpeedStrategy.setup_environment = DDPStrategy.setup_environment
    lightnings._validate_device_index_selection = lambda devices: None
    DeepSpeedStrategy.root_device = property(lambda self: torch.device("cpu", 0))
    fit.needs_gpu = lambda strategy: False
    # A faster sum on one machine, which a minute's compilation would cost.
    sys.modules[TorchBackend.__module__].build_shm_op = lambda: None


def run(arguments: list[str]) -> Ran:
    """Train once; an error is no traceback, as in a command."""
    output, error, Norms.found, Norms.stop = io.StringIO(), None, [], None
    if arguments[0].startswith("stop="):
        Norms.stop, arguments = int(arguments[0][5:]), arguments[1:]
    with contextlib.redirect_stdout(output):
        try:
            fit.fit(compose(arguments, "fit"))
        except ValueError as refused:
            error = str(refused)
        except SystemExit as end:
            error = f"status {end.code}"
        except Exception:
            error = traceback.format_exc()
    return Ran(output.getvalue(), error, Norms.found)


if __name__ == "__main__":
    lift_checks()
    fit.Progress = Norms
    given = Path(sys.argv[1])
    for arguments in json.loads((given / "runs.json").read_text()):
        ran = run(arguments)
        print(arguments, ran)
        if os.environ["RANK"] == "0":
            with (given / "ran.json").open("a") as file:
                file.write(json.dumps(vars(ran)) + "\n")
