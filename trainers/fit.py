"""`python -m trainers.fit recipe=NAME [scale=paper] [key=value ...]`: train, then export."""

import json
import logging
import shutil
import sys
import warnings
from functools import partial
from pathlib import Path

import pytorch_lightning as pl
import torch
from omegaconf import DictConfig, OmegaConf
from pytorch_lightning.accelerators import CUDAAccelerator
from pytorch_lightning.strategies import DeepSpeedStrategy, FSDPStrategy
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from pytorch_lightning.utilities.rank_zero import rank_zero_only
from torch.utils.data import DataLoader

from data.prompts import heldout_prompts
from data.stream import Schedule, Stream
from data.tokenizer import fingerprint
from decoding.cli import main, quiet
from decoding.compose import build, compose
from decoding.inputs import prepare_inputs
from decoding.load import check_tokenizers, load_tokenizer
from models import causal
from trainers.base import BaseModule, Optimization, WholeSteps
from trainers.callbacks import AcceptanceLength, LossGuard, progress
from trainers.checkpoints import Checkpoints, Preempted, checkpoint_files
from trainers.curve import Curve
from trainers.export import write_export
from trainers.provenance import provenance
from trainers.strategies import whole_network

# Settings that a run may change when it goes on: where it runs, not what it computes.
FREE = ("resume", "needs", "strategy", "trainer.devices", "trainer.num_nodes", "trainer.strategy",
        "trainer.accelerator", "trainer.workers", "trainer.compile",
        "trainer.checkpoint_activations")  # fmt: skip


def run(argv: list[str]) -> None:
    """The command."""
    # The libraries' chatter is for people who write their code, not for those who run a recipe.
    warnings.filterwarnings("ignore", module="pytorch_lightning")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    quiet()
    fit(compose(argv, "fit"))


def fit(config: DictConfig) -> Path:
    """Train a recipe and export the result; returns the export's folder."""
    folder = run_folder(config)
    export = folder / "export"
    checkpoint = checkpoint_to_resume(config, folder)
    if checkpoint is None and (export / "config.json").exists() and config.resume == "auto":
        print(f"{export} is there already: resume=never trains it anew, name=... beside it")
        return export
    prepare_inputs(config)
    if checkpoint is None:
        start_anew(folder)
    describe(config, folder)
    pl.seed_everything(config.seed, verbose=False)
    module = build_module(config)
    first = step_of(checkpoint) if checkpoint else 0
    trainer = build_trainer(config, folder, module, first)
    loaders = build_loaders(config, trainer, module, first)
    if config.trainer.checkpoint_activations:
        module.network.gradient_checkpointing_enable({"use_reentrant": False})
    if config.trainer.compile:
        module.network.compile()
    if trainer.is_global_zero:
        steps = config.trainer.max_steps
        print(f"{config.recipe} at scale {config.scale}: {steps} steps to {folder}")
    try:
        trainer.fit(module, *loaders, ckpt_path=checkpoint, weights_only=False)
    except Preempted as signal:
        print(f"{signal} at step {trainer.global_step}: go on with the same command")
        sys.exit(128 + signal.number)
    if trainer.global_step < config.trainer.max_steps:  # interrupted: nothing to export
        raise ValueError(f"stopped at step {trainer.global_step}: go on with the same command")
    next(c for c in trainer.callbacks if isinstance(c, Checkpoints)).save(trainer)
    metrics = {k: round(float(v), 4) for k, v in trainer.callback_metrics.items() if k != "step"}
    with whole_network(module):
        if trainer.is_global_zero:
            write_export(module, export, metrics=metrics, folder=folder)
            print(f"exported to {export}")
    return export


def run_folder(config: DictConfig) -> Path:
    """`<runs>/<recipe>[/<name>]`."""
    return Path(config.runs) / config.recipe / (config.name or "")


@rank_zero_only
def start_anew(folder: Path) -> None:
    """Remove an earlier run's checkpoints and export: resume=auto must not find them later."""
    for file in checkpoint_files(folder / "checkpoints"):
        file.unlink()
    shutil.rmtree(folder / "export", ignore_errors=True)


def checkpoint_to_resume(config: DictConfig, folder: Path) -> str | None:
    """The checkpoint that `resume=auto | never | PATH` asks for."""
    if config.resume == "never":
        return None
    if config.resume != "auto":
        if not Path(config.resume).is_file():
            raise ValueError(
                f"resume={config.resume!r} is no checkpoint file. Choose from ['auto', 'never'] "
                "or give the path of one"
            )
        return config.resume
    stored = folder / "config.yaml"
    if not stored.exists():
        return None
    changed = _difference(OmegaConf.load(stored), config)
    if changed:
        key, before, now = changed
        raise ValueError(
            f"{folder} holds a run with other settings ({key}: {before}, now {now}): "
            "give another name=..., or start anew with resume=never"
        )
    if (folder / "export" / "config.json").exists():  # finished
        return None
    for file in reversed(checkpoint_files(folder / "checkpoints")):
        try:
            step_of(str(file))
        except ValueError as error:
            print(f"{error}; falling back to the one before")
        else:
            return str(file)
    return None


def step_of(checkpoint: str) -> int:
    """The step that a checkpoint was written at."""
    try:
        return torch.load(checkpoint, weights_only=False, map_location="cpu")["global_step"]
    except Exception as error:  # zip, pickle and torch have an error each for a damaged file
        others = sorted(str(p) for p in Path(checkpoint).parent.glob("*.ckpt"))
        raise ValueError(
            f"the checkpoint {checkpoint} is damaged ({type(error).__name__}): give another one "
            f"with resume=, of {others}, or start anew with resume=never"
        ) from error


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


@rank_zero_only
def describe(config: DictConfig, folder: Path) -> None:
    """Write the resolved config and the provenance into the run's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(config, folder / "config.yaml", resolve=True)
    (folder / "provenance.json").write_text(json.dumps(provenance(), indent=1))


def build_module(config: DictConfig) -> BaseModule:
    """Tokenizer, network and module of a recipe."""
    tokenizer = build(config.tokenizer)
    network = build(config.network, tokenizer=tokenizer)
    target = None
    if config.target is not None:
        check_tokenizers(
            load_tokenizer(config.target), fingerprint(tokenizer), config.target, config.recipe
        )
        if config.acceptance.prompts:
            target = causal.load(config.target, dtype=config.acceptance.dtype).eval()
            target.requires_grad_(False)
    return build(
        config.module,
        network=network,
        tokenizer=tokenizer,
        optimization=Optimization(**config.optimization),
        target=target,
        _convert_="object",
    )


def build_trainer(
    config: DictConfig, folder: Path, module: BaseModule, first: int = 0
) -> pl.Trainer:
    """The Lightning trainer; steps, not epochs, are its unit. first: the step to start at."""
    t = config.trainer
    callbacks = [
        Checkpoints(folder / "checkpoints", every=t.checkpoint_every, keep=t.keep_last),
        LossGuard(factor=t.divergence_factor, wait=t.divergence_wait),
        progress(),
    ]
    a = config.acceptance
    if module.target is not None:
        prompts = heldout_prompts(a.source, module.tokenizer, a.prompts, a.prompt_length)
        ids = [p["prompt_ids"] for p in prompts]
        callbacks.append(AcceptanceLength(ids, list(a.temperatures), a.max_new_tokens))
    try:
        trainer = _trainer(config, Curve(folder / "metrics.csv", first), callbacks)
    except MisconfigurationException as error:  # a strategy or device that is not to be had here
        raise ValueError(" ".join(str(error).split())) from error
    if isinstance(trainer.strategy, (DeepSpeedStrategy, FSDPStrategy)) and not isinstance(
        trainer.accelerator, CUDAAccelerator
    ):
        raise ValueError(
            f"{type(trainer.strategy).__name__} needs a CUDA GPU, and there is none here. "
            "Choose from strategy=ddp and strategy=fsdp2 on a CPU"
        )
    schedule = Schedule(range(0), t.batch_size, t.micro_batch_size, world=trainer.world_size)
    trainer.accumulate_grad_batches = schedule.accumulate
    trainer.val_check_interval = min(t.validate_every, t.max_steps) * schedule.accumulate
    return trainer


def _trainer(config: DictConfig, logger: Curve, callbacks: list) -> pl.Trainer:
    t = config.trainer
    return pl.Trainer(
        accelerator=t.accelerator,
        devices=t.devices,
        num_nodes=t.num_nodes,
        strategy=build(t.strategy) if isinstance(t.strategy, DictConfig) else t.strategy,
        precision=t.precision,
        max_steps=t.max_steps,
        gradient_clip_val=t.gradient_clip,
        log_every_n_steps=t.log_every,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        enable_checkpointing=False,
        logger=logger,
        callbacks=callbacks,
        enable_model_summary=False,
    )


def build_loaders(
    config: DictConfig, trainer: pl.Trainer, module: BaseModule, first: int
) -> tuple[WholeSteps, DataLoader]:
    """Training and validation loaders. The order of the data depends on the seed alone.

    first: the step to start at.
    """
    t, d = config.trainer, config.data
    corruption = check = None
    if d.corruption is not None:
        corruption = build(d.corruption, tokenizer=module.tokenizer)
        check = build(d.validation_corruption or d.corruption, tokenizer=module.tokenizer)
    rows = partial(build, tokenizer=module.tokenizer, folder=d.folder)
    train, held_out = rows(d.train), rows(d.validation)
    size = (t.batch_size, t.micro_batch_size, trainer.global_rank, trainer.world_size)
    batches = Schedule(range(first, t.max_steps), *size)
    loader = DataLoader(
        Stream(train, config.seed, corruption), batch_sampler=batches, num_workers=t.workers
    )
    steps = max(1, min(d.validation_rows, len(held_out)) // t.batch_size)
    validation = DataLoader(
        Stream(held_out, config.seed, check), batch_sampler=Schedule(range(steps), *size)
    )
    return WholeSteps(loader, trainer.accumulate_grad_batches, t.max_steps, module), validation


if __name__ == "__main__":
    main(run)
