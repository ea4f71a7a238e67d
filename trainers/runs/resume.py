"""The checkpoint that a run goes on from (`resume=auto | never | PATH`), checked for its folder."""

from pathlib import Path

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pytorch_lightning.utilities.rank_zero import rank_zero_only

from data.files import same_setting
from trainers.publishing.export_folder import is_export
from trainers.runs.checkpoint_files import Damaged, checkpoint_files, step_of

# Settings that a run may change when it goes on: where it runs, not what it computes.
FREE = ("resume", "needs", "logger", "strategy", "device_map", "trainer.devices",
        "trainer.num_nodes",
        "trainer.strategy", "trainer.accelerator", "trainer.workers", "trainer.compile",
        "trainer.micro_batch_size", "trainer.checkpoint_activations", "trainer.checkpoint_every",
        "trainer.keep_last", "trainer.keep_best", "lora.merge")  # fmt: skip


def checkpoint_to_resume(config: DictConfig, folder: Path) -> tuple[Path | None, int]:
    """The checkpoint that `resume=auto | never | PATH` asks for.

    A folder that holds a run is started at step 0 for `resume=never` only.

    Args:
        config: The composed recipe.
        folder: The run's.

    Returns:
        (the checkpoint, its step); (None, 0) for a start at step 0 or a finished run.

    Raises:
        ValueError: A folder of another recipe or of other settings, or one whose config.yaml is
            lost; no checkpoint at PATH; only damaged ones, or one that cannot be read.
    """
    before = stored_config(folder / "config.yaml")
    if before is not None and before.recipe != config.recipe:
        raise ValueError(
            f"{folder} holds a run of recipe {before.recipe!r}, not of {config.recipe!r}: "
            "give another runs=... or name=..."
        )
    if config.resume == "never":
        return None, 0
    if config.resume != "auto":
        path = Path(config.resume)
        if not (path.is_file() or path.is_dir()):  # a device has no end
            raise ValueError(
                f"resume={config.resume!r} is no checkpoint. Choose from ['auto', 'never'] "
                "or give the path of one"
            )
        return path, step_of(path)
    checkpoints = checkpoint_files(folder / "checkpoints")
    if before is None:
        _check_empty(folder, checkpoints)
        return None, 0
    finished = is_export(folder / "export")
    changed = _difference(before, config)
    # A run that ended before its first checkpoint has nothing that other settings would mix with.
    if changed and (checkpoints or finished):
        key, was, now = changed
        raise ValueError(
            f"{folder} holds a run with other settings ({key}: {was}, now {now}): "
            "give another name=..., or start anew with resume=never"
        )
    if finished:
        return None, 0
    for path in reversed(checkpoints):
        try:
            return path, step_of(path)
        except Damaged as error:
            rank_zero_only(print)(f"{error}; falling back to the one before")
    if checkpoints:
        raise ValueError(
            f"all checkpoints of {folder} are damaged ({_names(checkpoints)}): give the path of "
            "another one with resume=PATH, or start anew with resume=never"
        )
    return None, 0


def stored_config(file: Path) -> DictConfig | None:
    """The config of a run; None where it is lost: no file, an empty one, or something else."""
    try:
        stored = OmegaConf.load(file)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if error.errno is None:  # OmegaConf's, for neither a mapping nor a list
            return None
        raise
    except (yaml.YAMLError, UnicodeDecodeError, OmegaConfBaseException):
        return None
    return stored if isinstance(stored, DictConfig) and stored.get("recipe") else None


def _check_empty(folder: Path, checkpoints: list[Path]) -> None:
    """Raise ValueError for a run whose config is lost: it may be one of other settings."""
    found = [*checkpoints, folder / "export"] if is_export(folder / "export") else checkpoints
    if found:
        raise ValueError(
            f"{folder} holds {_names(found)}, but its config.yaml is lost or is none: give "
            f"resume=PATH ({checkpoints[-1] if checkpoints else 'of a checkpoint'}) to go on with "
            "these settings, resume=never to start anew, or another name=..."
        )


def _names(paths: list[Path]) -> str:
    return ", ".join(path.name for path in paths)


def _difference(stored: DictConfig, config: DictConfig) -> tuple | None:
    """The first setting that differs, as (key, before, now)."""
    flat = []
    for c in (stored, config):
        flat.append(dict(_flatten(OmegaConf.to_container(c, resolve=True))))
    for key in sorted({*flat[0], *flat[1]}):
        free = any(key == f or key.startswith(f"{f}.") for f in FREE)
        was, now = (settings.get(key) for settings in flat)
        if not free and not same_setting(was, now):
            return key, was, now
    return None


def _flatten(node, prefix=""):
    if not isinstance(node, dict):
        yield prefix[:-1], node
        return
    for key, value in node.items():
        yield from _flatten(value, f"{prefix}{key}.")
