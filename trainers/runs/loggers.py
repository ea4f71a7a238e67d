"""The loggers of a run: metrics.csv always, and wandb or TensorBoard where a recipe names one."""

import os
import shutil
import uuid
from importlib.util import find_spec
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from pytorch_lightning.loggers import Logger, TensorBoardLogger, WandbLogger
from pytorch_lightning.utilities.rank_zero import rank_zero_only

from data.files import atomic_write
from recipes.command import one_line
from trainers.runs.curve import Curve


def check_logger(name: str | None) -> None:
    """Raise ValueError for the name of a logger that is not installed."""
    if name is not None and find_spec(name) is None:
        raise ValueError(f"logger={name} needs a package that is not here: pip install {name}")


def build_loggers(config: DictConfig, folder: Path, first: int) -> list[Logger]:
    """Build `Curve` and, on the first process, the logger that the recipe names."""
    loggers: list[Logger] = [Curve(folder / "metrics.csv", first)]
    if config.logger is not None and rank_zero_only.rank == 0:
        make = {"tensorboard": _tensorboard, "wandb": _wandb}[config.logger]
        loggers.append(make(config, folder, first))
    return loggers


def _tensorboard(config: DictConfig, folder: Path, first: int) -> Logger:
    """Build the logger into <folder>/tensorboard; points after step `first` are replaced."""
    if first == 0:
        shutil.rmtree(folder / "tensorboard", ignore_errors=True)
    logger = TensorBoardLogger(folder, name="tensorboard", version="", purge_step=first + 1)
    if first == 0:  # a resumed run has them already
        logger.log_hyperparams(OmegaConf.to_container(config, resolve=True))
    return logger


class Wandb(WandbLogger):
    """The wandb logger; its run ends with the fit, so the next fit of the process has its own."""

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """End the run, as failed if the fit failed."""
        self.experiment.finish(exit_code=int(status != "success"))


def _wandb(config: DictConfig, folder: Path, first: int) -> Logger:
    """Build the logger of the project parade; a resumed run keeps its wandb id."""
    import wandb

    file = folder / "wandb" / "id"
    if first == 0 or not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(file) as temporary:
            temporary.write_text(uuid.uuid4().hex[:8])
    try:
        mode = os.environ.get("WANDB_MODE")
        keyless = mode is None and not wandb.login(prompt=False)
        run = wandb.init(
            project="parade",
            name=folder.relative_to(config.runs).as_posix(),
            config=OmegaConf.to_container(config, resolve=True),
            dir=folder,
            id=file.read_text(),
            resume="allow",
            allow_val_change=True,  # see FREE in trainers/runs/resume.py
            mode="offline" if keyless else mode,  # type: ignore[arg-type]  # wandb checks it
            settings=wandb.Settings(silent=True, console="off"),
        )
    except wandb.Error as error:
        raise ValueError(
            f"logger=wandb: {one_line(error).rstrip('.')}. See to the network or the key (wandb "
            "login), or set WANDB_MODE=offline and send the run later"
        ) from error
    # Its own count of steps counts what is logged; ours is the axis of every metric.
    run.define_metric("trainer/global_step")
    run.define_metric("*", step_metric="trainer/global_step")
    if keyless:
        print(
            "wandb has no key here (wandb login, or WANDB_API_KEY), so the run stays offline; "
            f"send it with: wandb sync {Path(run.dir).parent}"
        )
    elif run.url:
        print(f"wandb: {run.url}")
    return Wandb(experiment=run)
