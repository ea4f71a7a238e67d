"""The checkpoint that a run resumes from (`resume=auto | never | PATH`), checked for its folder."""

from collections.abc import Iterable
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from pytorch_lightning.utilities.rank_zero import rank_zero_only

from data.files import same_setting
from recipes.options import types_of
from recipes.settings import Acceptance, Data, Trainer
from recipes.stored import read_config
from recipes.values import check
from trainers.publishing.export_folder import is_export
from trainers.runs.checkpoint_files import Damaged, checkpoint_files, step_of

# Settings that a run may change when it goes on: where it runs, not what it computes.
FREE = ("resume", "needs", "then", "logger", "strategy", "device_map", "trainer.devices",
        "trainer.num_nodes",
        "trainer.strategy", "trainer.accelerator", "trainer.workers", "trainer.compile",
        "trainer.micro_batch_size", "trainer.checkpoint_activations", "trainer.checkpoint_every",
        "trainer.keep_last", "trainer.keep_best", "lora.merge")  # fmt: skip


IN_MINUTES = (  # settings that follow from `minutes`
    ("trainer", Trainer, "max_steps"),
    ("trainer", Trainer, "validate_every"),
    ("data", Data, "validation_rows"),
    ("acceptance", Acceptance, "prompts"),
)


def checkpoint_to_resume(config: DictConfig, folder: Path) -> tuple[Path | None, int]:
    """Return the checkpoint that `resume=auto | never | PATH` asks for, and its step.

    It is (None, 0) for a start at step 0 or a finished run. A folder that holds a run is started at
    step 0 for resume=never only.
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
        return Path(config.resume), step_of(Path(config.resume))
    checkpoints = checkpoint_files(folder / "checkpoints")
    finished = is_export(folder / "export")
    # A run that ended before its first checkpoint has nothing that other settings would mix with.
    if checkpoints or finished:
        found = [*checkpoints, *[folder / "export"] * finished]
        # What an export is written as may change until there is one.
        free = [key for key in FREE if key != "lora.merge" or not finished]
        _check_settings(before, config, folder, found, free)
    if not checkpoints or before is None or finished:
        return None, 0
    for path in reversed(checkpoints):
        try:
            return path, step_of(path)
        except Damaged as error:
            rank_zero_only(print)(f"{error}; falling back to the one before")
    raise ValueError(
        f"all checkpoints of {folder} are damaged ({_names(checkpoints)}): give the path of "
        "another one with resume=PATH, or start anew with resume=never"
    )


def with_stored_steps(config: DictConfig, folder: Path) -> DictConfig:
    """Return a recipe of so many `minutes` with the steps that its run in the folder has.

    A run without a checkpoint has none yet: its steps are measured anew.
    """
    if config.minutes is None or config.resume == "never":
        return config
    if config.resume != "auto":
        folder = Path(config.resume).parent.parent
    before = stored_config(folder / "config.yaml")
    begun = checkpoint_files(folder / "checkpoints") or is_export(folder / "export")
    if not begun or before is None or before.get("minutes") != config.minutes:
        if config.resume == "auto":
            return config
        raise ValueError(
            f"minutes={config.minutes:g} with resume={config.resume}, of a run of another length: "
            "give trainer.max_steps="
        )
    config = config.copy()
    for part, kind, key in IN_MINUTES:
        value = OmegaConf.select(before, f"{part}.{key}")
        config[part][key] = check(f"{part}.{key}", value, types_of(kind)[key])
    return config


def stored_config(file: Path) -> DictConfig | None:
    """Read the config of a run; None if it is lost: no file, an empty one, something else."""
    if not file.is_file():
        return None
    try:
        stored = read_config(file)
    except ValueError:
        return None
    return stored if isinstance(stored.get("recipe"), str) else None


def _check_settings(
    before: DictConfig | None,
    config: DictConfig,
    folder: Path,
    found: list[Path],
    free_keys: Iterable[str],
) -> None:
    """Raise ValueError if `found` in a folder has other settings, or their config is lost.

    `free_keys` may differ.
    """
    if before is None:
        path = next((p for p in reversed(found) if p.suffix == ".ckpt"), "of a checkpoint")
        raise ValueError(
            f"{folder} holds {_names(found)}, but its config.yaml is lost or is none: give "
            f"resume=PATH ({path}) to go on with these settings, resume=never to start anew, or "
            "another name=..."
        )
    then, now = (dict(_flatten(OmegaConf.to_container(c, resolve=True))) for c in (before, config))
    for key in sorted({*then, *now}):
        free = any(key == f or key.startswith(f"{f}.") for f in free_keys)
        if not free and not same_setting(then.get(key), now.get(key)):
            raise ValueError(
                f"{folder} holds a run with other settings ({key}: {then.get(key)}, now "
                f"{now.get(key)}): give another name=..., or start anew with resume=never"
            )


def _names(paths: list[Path]) -> str:
    return ", ".join(path.name for path in paths)


def _flatten(node, prefix=""):
    if not isinstance(node, dict):
        yield prefix[:-1], node
        return
    for key, value in node.items():
        yield from _flatten(value, f"{prefix}{key}.")
