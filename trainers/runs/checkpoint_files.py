"""Checkpoints on disk: complete or absent, whatever kills the write.

`step-N.ckpt` is a file, or a folder of shards if the strategy writes one. Both have a hidden name
until all bytes are on the disk: the rename is the mark of a complete checkpoint.
"""

import json
import pickle
import re
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from zipfile import ZIP_STORED, BadZipFile, ZipFile

import pytorch_lightning as pl
import torch
from lightning_fabric.utilities.load import _load_distributed_checkpoint
from pytorch_lightning.plugins.io import TorchCheckpointIO
from pytorch_lightning.strategies import DeepSpeedStrategy
from pytorch_lightning.utilities.rank_zero import rank_zero_only
from torch import nn
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.checkpoint.api import CheckpointException

from data.files import check_space, delete, put_in_place, shortened
from recipes.values import LARGEST
from trainers.runs.safe_load import Refused, check_folder, read_file

ENGINE = "checkpoint"  # the tag that Lightning gives to a folder that DeepSpeed writes
MANIFEST = "manifest.json"  # a folder's step, and the size in bytes of every file
# Errors that say that a checkpoint is damaged; others say only that it could not be read this time.
DAMAGE = (BadZipFile, EOFError, KeyError, TypeError, AttributeError, pickle.UnpicklingError,
          json.JSONDecodeError, UnicodeDecodeError)  # fmt: skip


class Damaged(ValueError):
    """A checkpoint whose checksums, sizes or structure are wrong: reading it again cannot help."""


class DirectIO(TorchCheckpointIO):
    """The plugin that writes a checkpoint directly, not as Lightning's does by memory and /tmp."""

    def save_checkpoint(self, checkpoint, path, storage_options=None) -> None:
        """Write the file; an error has the system's reason in its context."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with open(path, "wb") as file:
            torch.save(checkpoint, file)

    def load_checkpoint(self, path, map_location=None, weights_only=None) -> dict[str, Any]:
        """Read a file, or the shards of FSDP2 as the file that one process would have written."""
        if not Path(path).is_dir():
            return super().load_checkpoint(path, map_location, weights_only)
        content = _load_distributed_checkpoint(Path(path))
        states = content.pop("optimizer_0")
        order = [name for group in states["param_groups"] for name in group["params"]]
        content["optimizer_states"] = [renamed(states, {name: i for i, name in enumerate(order)})]
        return content


def renamed(states: dict[str, Any], names: Sequence[str] | dict[str, int]) -> dict[str, Any]:
    """Return an optimizer's state_dict with new names of its parameters, by their old ones.

    A file has their numbers in the order of the parameter groups, shards have their own names.
    """
    return {
        "state": {names[old]: state for old, state in states["state"].items()},
        "param_groups": [
            {**group, "params": [names[old] for old in group["params"]]}
            for group in states["param_groups"]
        ],
    }


def checkpoint_files(folder: Path) -> list[Path]:
    """List the complete checkpoints in a folder, which need not exist, oldest step first."""
    try:  # `glob` would find nothing in a folder that cannot be listed
        files = [f for f in folder.iterdir() if f.suffix == ".ckpt" and number_of(f) >= 0]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(files, key=number_of)


def number_of(path: Path) -> int:
    """Return the step in a checkpoint's name; -1 for another name."""
    found = re.fullmatch(r"step-(\d+)", path.stem)
    return int(found[1]) if found else -1


def check_room(folder: Path, module: pl.LightningModule, written: int, kept: int) -> None:
    """Check that the disk has room for the checkpoints of a run that are in a folder at once.

    One has the weights, and two numbers of the optimizer for each that is trained.

    Args:
        folder: Of the checkpoints.
        module: The run's.
        written: How many will be written, at the most.
        kept: How many are kept; one more is there while it is written.
    """
    if not written:
        return
    weights = [x for x in module.state_dict().values() if isinstance(x, torch.Tensor)]
    trained = [x for x in module.parameters() if x.requires_grad]
    one = sum(x.numel() * x.element_size() for x in (*weights, *trained, *trained))
    more = min(written, kept + 1 - len(checkpoint_files(folder)))
    check_space(folder, one * max(more, 1))


def write_checkpoint(trainer: pl.Trainer, path: Path) -> None:
    """Save the trainer's state; every process must call, on a file system that all share.

    An error of the disk is a ValueError on all processes; earlier checkpoints stay untouched.
    """
    partial = _hidden(path)

    def failed(problem: str | None) -> bool:  # on any process; they wait for each other here
        return trainer.strategy.reduce_boolean_decision(problem is not None, all=False)

    problem = _problem(trainer.save_checkpoint, partial)
    if problem is not None:
        trainer.strategy.barrier()  # the others wait at the one that ends save_checkpoint
    if not failed(problem) and trainer.is_global_zero:
        problem = _problem(_put_in_place, partial, path, trainer)
    if failed(problem):
        if trainer.is_global_zero:
            delete(partial)
        before = checkpoint_files(path.parent)
        raise ValueError(
            f"the checkpoint {path} could not be written "
            f"({problem or 'another process tells why'}): mend that and go on with the same "
            f"command; the last checkpoint is {before[-1] if before else 'none yet'}"
        )


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint; a kill during the removal leaves nothing that looks like one."""
    if path.is_dir():
        path = path.rename(_hidden(path))
    delete(path)


@rank_zero_only
def delete_partial(folder: Path) -> None:
    """Remove partial checkpoints, left in a folder by killed writes."""
    for partial in folder.glob(".step-*.partial"):
        delete(partial)


def step_of(path: Path) -> int:
    """Return the step of a checkpoint, after a check of all of its bytes.

    Raises:
        Damaged: Its checksums, sizes or structure are wrong.
        Refused: It asks to call something; nothing of it was run.
        ValueError: There is none, or it cannot be read now (no permission, no memory).
    """
    if not (path.is_file() or path.is_dir()):  # a device has no end
        raise ValueError(
            f"{str(path)!r} is no checkpoint: give the path of one (resume= takes auto and never)"
        )
    try:
        return (_step_of_folder if path.is_dir() else _step_of_file)(path)
    except Refused:
        raise
    except DAMAGE as error:
        others = [str(p) for p in checkpoint_files(path.parent) if p != path]
        raise Damaged(
            f"the checkpoint {path} is damaged ({_reason(error)}): give another one "
            f"with resume=, of {others}, or start anew with resume=never"
        ) from error
    except Exception as error:  # torch's for too little memory is a RuntimeError
        reason = getattr(error, "strerror", None) or f"{type(error).__name__} {error}"
        raise ValueError(
            f"the checkpoint {path} cannot be read ({' '.join(reason.split())[:200]}), which is no "
            "damage: nothing was changed; mend that and go on with the same command"
        ) from None  # as a cause it would be taken for a step that got no memory


def size_of(path: Path) -> tuple[int, int]:
    """Return how many tensors a checkpoint that `step_of` has read holds at most, and its bytes."""
    if path.is_file():
        return len(_weights(path)), path.stat().st_size
    size = sum(f.stat().st_size for f in path.rglob("*") if f.is_file())
    if (path / ENGINE).is_dir():
        return size, size
    return len(FileSystemReader(path).read_metadata().state_dict_metadata), size


def check_fits(module: nn.Module, path: Path) -> None:
    """Raise ValueError for a checkpoint of other tensors; of shards this is seen when they load."""
    if path.is_dir():
        return
    own, stored = module.state_dict(), _weights(path)
    # What is no tensor, a module's own state, has no size.
    sizes = [{n: tuple(getattr(x, "shape", ())) for n, x in of.items()} for of in (own, stored)]
    other = sorted({str(name) for name, _ in sizes[0].items() ^ sizes[1].items()})
    if other:
        here, there = (of.get(other[0], "none") for of in sizes)
        raise ValueError(
            f"the checkpoint {path} is of another recipe, or of other settings: {len(other)} "
            f"tensors differ from the network's ({other[0][:100]}: there {there}, here {here})"
        )


def check_strategy(path: Path, trainer: pl.Trainer, given: str) -> None:
    """Raise ValueError if a run cannot go on from a checkpoint with a strategy.

    DeepSpeed's shards belong to a stage and a number of processes, and DeepSpeed reads no others.
    All other strategies read each other's. `given` is the strategy as the recipe names it.
    """
    manifest = json.loads((path / MANIFEST).read_text()) if path.is_dir() else {}
    before, then = manifest.get("strategy"), manifest.get("processes")
    if (path / ENGINE).is_dir():
        now = (getattr(trainer.strategy, "strategy_name", None), trainer.world_size)
        allowed = before is None or now == (before, then)
        wanted = f"strategy={before} on {then} processes, as before"
    else:
        allowed = not isinstance(trainer.strategy, DeepSpeedStrategy)
        wanted = "strategy=ddp or strategy=fsdp2"
    if not allowed:
        raise ValueError(
            f"the checkpoint {path} cannot go on with strategy={given} on {trainer.world_size} "
            f"processes: give {wanted}. Or begin another run, name=..., with its weights alone: "
            "python -m trainers.export run=... checkpoint=... makes an export of them, for the "
            "recipe's key of the network to start from"
        )


def load_weights(module: nn.Module, path: Path) -> None:
    """Load into a module, on one process, the weights of a checkpoint that `step_of` has read."""
    check_fits(module, path)
    try:
        _load_weights(module, path)
    except Exception as error:  # torch's for values of other kinds and for shards are many
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise ValueError(
            f"the weights of {path} cannot be loaded into this recipe's network ({reason})"
        ) from error


def _load_weights(module: nn.Module, path: Path) -> None:
    if path.is_file():
        weights = _weights(path)
        _cast(module, {name: getattr(x, "dtype", None) for name, x in weights.items()})
        module.load_state_dict(weights)
    elif (path / ENGINE).is_dir():  # DeepSpeed's: float32 masters of weights of the run's dtype
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        dtype = json.loads((path / MANIFEST).read_text()).get("dtype", "float32")
        _cast(module, {name: getattr(torch, dtype) for name, _ in module.named_parameters()})
        module.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(str(path), ENGINE))
    else:
        stored = FileSystemReader(path).read_metadata().state_dict_metadata
        kinds = {name: getattr(x, "properties", None) for name, x in stored.items()}
        start = "state_dict."
        _cast(module, {n.removeprefix(start): k and k.dtype for n, k in kinds.items()})
        with warnings.catch_warnings():  # that it loads in one process is what is wanted
            warnings.simplefilter("ignore", UserWarning)
            load({"state_dict": module.state_dict()}, checkpoint_id=path, no_dist=True)  # in place


def _cast(module: nn.Module, dtypes: dict[str, torch.dtype | None]) -> None:
    """Give parameters the dtypes of the run: a copy of its weights would keep theirs."""
    for name, p in module.named_parameters():
        p.data = p.data.to(dtypes.get(name) or p.dtype)


def _weights(file: Path) -> dict[str, Any]:
    """Return the network's tensors, by name, in a checkpoint that is a file."""
    return read_file(file)["state_dict"]


def _checked_step(step: Any) -> int:
    """Return a checkpoint's step; TypeError for anything but a number of steps."""
    if type(step) is not int or not 0 <= step <= LARGEST:
        given = shortened(step) if isinstance(step, str) else f"of type {type(step).__name__}"
        raise TypeError(f"its step is {given}, not an integer from 0 to {LARGEST}")
    return step


def _step_of_file(file: Path) -> int:
    try:  # torch.load does not notice a changed byte, the zip's sum does
        with ZipFile(file) as archive:
            if any(f.compress_type != ZIP_STORED for f in archive.infolist()):  # torch packs none
                raise BadZipFile
            whole = archive.testzip() is None
    except (OSError, MemoryError):
        raise
    except Exception as error:  # a changed byte of its structure makes many kinds
        raise BadZipFile from error
    if not whole:
        raise BadZipFile
    content = read_file(file)
    if not isinstance(content, dict):
        raise TypeError(f"it holds {type(content).__name__}, no names and values")
    if not isinstance(content["state_dict"], dict):
        raise TypeError(f"its state_dict is of type {type(content['state_dict']).__name__}")
    return _checked_step(content["global_step"])


def _step_of_folder(folder: Path) -> int:
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        if any((folder / name).stat().st_size != size for name, size in manifest["files"].items()):
            raise EOFError
    except FileNotFoundError as error:
        raise EOFError from error
    if not (folder / ENGINE).is_dir():
        check_folder(folder)
    return _checked_step(manifest["step"])


def _put_in_place(partial: Path, path: Path, trainer: pl.Trainer) -> None:
    if partial.is_dir():
        files = [f for f in partial.rglob("*") if f.is_file()]
        manifest = {
            "step": trainer.global_step,
            "strategy": getattr(trainer.strategy, "strategy_name", None),
            "processes": trainer.world_size,
            "dtype": str(trainer.lightning_module.network.dtype).removeprefix("torch."),
            "files": {str(f.relative_to(partial)): f.stat().st_size for f in files},
        }
        (partial / MANIFEST).write_text(json.dumps(manifest))
    put_in_place(partial, path, sync=True)


def _problem(action: Callable, *arguments) -> str | None:
    """Call `action`; return the reason in a few words if it fails, else None."""
    try:
        action(*arguments)
    except (OSError, RuntimeError, CheckpointException) as error:
        if isinstance(error, CheckpointException):
            error, _ = next(iter(error.failures.values()))
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__cause__ or cause.__context__
        return getattr(cause, "strerror", None) or " ".join(str(error).split())[:200]
    return None


def _reason(error: Exception) -> str:
    """Return what is wrong with a damaged checkpoint, in a few words."""
    if isinstance(error, KeyError):
        return f"it has no {error}"
    return str(error) if isinstance(error, TypeError) else type(error).__name__


def _hidden(path: Path) -> Path:
    return path.with_name(f".{path.stem}.partial")
