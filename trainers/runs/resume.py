"""What a run goes on from: `resume=auto | never | PATH`, and whether that fits its folder."""

import shutil
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from pytorch_lightning.utilities.rank_zero import rank_zero_only

from trainers.publishing.export_folder import is_export
from trainers.runs.checkpoint_files import checkpoint_files, forget_after, step_of

# Settings that a run may change when it goes on: where it runs, not what it computes.
FREE = ("resume", "needs", "logger", "strategy", "trainer.devices", "trainer.num_nodes",
        "trainer.strategy", "trainer.accelerator", "trainer.workers", "trainer.compile",
        "trainer.micro_batch_size", "trainer.checkpoint_activations", "trainer.checkpoint_every",
        "trainer.keep_last", "trainer.keep_best", "lora.merge")  # fmt: skip


def run_folder(config: DictConfig) -> Path:
    """`<runs>/<recipe>[/<name>]`."""
    name = str(config.name or "")  # a number is a name too
    if name in ("checkpoints", "export", "bench"):
        raise ValueError(f"name={name} is a folder of the run without a name: give another")
    return Path(config.runs) / config.recipe / name


def checkpoint_to_resume(config: DictConfig, folder: Path) -> tuple[Path | None, int]:
    """The checkpoint that `resume=auto | never | PATH` asks for, and its step.

    Errors: a folder of another recipe or of other settings; no or a damaged checkpoint at PATH.
    """
    stored = folder / "config.yaml"
    before = OmegaConf.load(stored) if stored.exists() else None
    if before and before.recipe != config.recipe:
        raise ValueError(
            f"{folder} holds a run of recipe {before.recipe!r}, not of {config.recipe!r}: "
            "give another runs=... or name=..."
        )
    if config.resume == "never":
        return None, 0
    if config.resume != "auto":
        if not Path(config.resume).exists():
            raise ValueError(
                f"resume={config.resume!r} is no checkpoint. Choose from ['auto', 'never'] "
                "or give the path of one"
            )
        return Path(config.resume), step_of(Path(config.resume))
    if not before:
        return None, 0
    changed = _difference(before, config)
    if changed:
        key, was, now = changed
        raise ValueError(
            f"{folder} holds a run with other settings ({key}: {was}, now {now}): "
            "give another name=..., or start anew with resume=never"
        )
    if is_export(folder / "export"):  # finished
        return None, 0
    for path in reversed(checkpoint_files(folder / "checkpoints")):
        try:
            return path, step_of(path)
        except ValueError as error:
            rank_zero_only(print)(f"{error}; falling back to the one before")
    return None, 0


@rank_zero_only
def forget(folder: Path, step: int) -> None:
    """Remove what a run that goes on from `step` will make again: later resumes must not find it.

    That is later checkpoints, the export, and what killed writes have left of either.
    """
    forget_after(folder / "checkpoints", step)
    for export in (folder / "export", *folder.glob(".export.*")):
        shutil.rmtree(export, ignore_errors=True)


def _difference(stored: DictConfig, config: DictConfig) -> tuple | None:
    """The first setting that differs, as (key, before, now)."""
    flat = []
    for c in (stored, config):
        flat.append(dict(_flatten(OmegaConf.to_container(c, resolve=True))))
    for key in sorted({*flat[0], *flat[1]}):
        free = any(key == f or key.startswith(f"{f}.") for f in FREE)
        if not free and flat[0].get(key) != flat[1].get(key):
            return key, flat[0].get(key), flat[1].get(key)
    return None


def _flatten(node, prefix=""):
    if not isinstance(node, dict):
        yield prefix[:-1], node
        return
    for key, value in node.items():
        yield from _flatten(value, f"{prefix}{key}.")
