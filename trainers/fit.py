"""`python -m trainers.fit recipe=NAME [scale=paper] [key=value ...]`: train, then export."""

import inspect
import logging
import math
import sys
import warnings
from functools import partial
from pathlib import Path

import pytorch_lightning as pl
from omegaconf import DictConfig, OmegaConf
from pytorch_lightning.accelerators import CUDAAccelerator
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from pytorch_lightning.utilities.rank_zero import rank_zero_only
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase

from data.files import atomic_write
from data.rows.stream import BatchSchedule, Stream
from decoding.commands.claim import claimed
from decoding.commands.cli import main, quiet
from decoding.commands.inputs import prepare_inputs
from decoding.commands.recipes import build, check_arguments, compose, run_folder
from models.attention import WRITTEN_OUT, fused_attention, switch_attention
from trainers.base import BaseModule, Optimization, WholeSteps
from trainers.lora import add_lora
from trainers.publishing.export_folder import is_export, write_export
from trainers.runs.callbacks import AcceptanceLength, validation_prompts
from trainers.runs.checkpoint_files import DirectIO, check_fits, reading
from trainers.runs.checkpoints import Checkpoints, Preempted
from trainers.runs.curve import latest
from trainers.runs.guards import LossGuard, with_memory_advice
from trainers.runs.loggers import build_loggers, check_logger
from trainers.runs.progress import progress
from trainers.runs.provenance import provenance, write_provenance
from trainers.runs.randomness import RandomStates
from trainers.runs.resume import checkpoint_to_resume
from trainers.runs.set_aside import drop_set_aside, set_aside
from trainers.runs.stored_states import with_states
from trainers.strategies import needs_gpu, precision_of, strategy_of, whole_network


def run(argv: list[str]) -> None:
    """The command `python -m trainers.fit`.

    Args:
        argv: key=value settings.

    Raises:
        ValueError: A setting or an input is wrong; one line says which and what is allowed.
    """
    # The libraries' chatter is for people who write their code, not for those who run a recipe.
    warnings.filterwarnings("ignore", module="pytorch_lightning")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    quiet()
    fit(compose(argv, "fit"))


@with_memory_advice
def fit(config: DictConfig) -> Path:
    """Train a recipe, or go on with its run, and export the result.

    Args:
        config: The composed recipe.

    Returns:
        The export's folder; at once where it is there already and resume=auto.

    Raises:
        ValueError: A setting or an input is wrong, the loss diverges or is not finite, the folder
            or a checkpoint cannot be written, or no memory is left.
        SystemExit: 128 + the signal's number, after a signal and the checkpoint that it asks for.
    """
    check_logger(config.logger)
    check_trainer(config.trainer)
    config = of_this_device(config)
    given = OmegaConf.to_container(config.optimization, resolve=True)
    check_arguments(given, inspect.signature(Optimization).parameters.values(), "optimization.")
    optimization = Optimization(**given)
    if config.trainer.max_steps is not None:
        optimization.warmup(config.trainer.max_steps)  # raises now, not after the inputs are made
    folder = run_folder(config)
    with claimed(folder):
        return _fit(config, folder, optimization)


def _fit(config: DictConfig, folder: Path, optimization: Optimization) -> Path:
    """`fit` in a run's folder, where no other process works."""
    export = folder / "export"
    checkpoint, first = checkpoint_to_resume(config, folder)
    if checkpoint is None and is_export(export) and config.resume == "auto":
        print(f"{export} is there already: resume=never trains it anew, name=... beside it")
        return export
    prepare_inputs(config)
    pl.seed_everything(config.seed, verbose=False)
    module = build_module(config)
    if config.resume not in ("auto", "never"):
        check_fits(module, checkpoint)
    for key in ("compile", "checkpoint_activations"):
        if config.trainer[key] and module.hooked:
            raise ValueError(
                f"trainer.{key}=true is not allowed with module.noise_layers: the drafter reads "
                "noise by hooks of each step, which would not run"
            )
    counted = in_steps(config, module)
    steps = counted.trainer.max_steps
    warmup = optimization.warmup(steps)
    trainer = build_trainer(counted, folder, module)
    loaders = build_loaders(counted, trainer, module, first)  # a mistake in it leaves no files
    set_aside(folder, first, checkpoint)
    describe(config, folder)
    trainer.loggers = build_loggers(config, folder, first)
    rows = {"train": loaders[0].loader.dataset.rows, "validation": loaders[1].dataset.rows}
    start = provenance(config, trainer, rows, first)
    write_provenance(folder / "provenance.json", start, resumed=checkpoint is not None)
    if config.trainer.checkpoint_activations:
        module.network.gradient_checkpointing_enable({"use_reentrant": False})
    if config.trainer.compile:
        if trainer.strategy.root_device.type == "cpu":
            switch_attention(module.network, WRITTEN_OUT)
        module.network.compile()
    if trainer.is_global_zero:
        if warmup < optimization.warmup_steps:
            print(
                f"optimization.warmup_steps={optimization.warmup_steps} is shortened to {warmup}: "
                f"a fifth of trainer.max_steps={steps} (optimization.shorten_warmup)"
            )
        epochs = config.trainer.max_epochs
        passes = "" if epochs is None else f" ({epochs:g} epochs of {len(rows['train'])} rows)"
        print(f"{config.recipe} at scale {config.scale}: {steps} steps{passes} to {folder}")
    try:
        with reading(checkpoint):
            trainer.fit(module, *loaders, ckpt_path=checkpoint, weights_only=True)
    except Preempted as signal:
        if trainer.is_global_zero:
            print(f"{signal} at step {trainer.global_step}: go on with the same command")
        sys.exit(128 + signal.number)
    if trainer.global_step < steps:  # interrupted: nothing to export
        raise ValueError(f"stopped at step {trainer.global_step}: go on with the same command")
    with whole_network(module), fused_attention(module.network):
        if trainer.is_global_zero:
            merge = config.lora.merge
            metrics = latest(folder / "metrics.csv", trainer.global_step)
            with module.averaged():
                write_export(module, export, metrics=metrics, folder=folder, merge=merge)
            drop_set_aside(folder)
            print(f"exported to {export}")
    return export


def check_trainer(t: DictConfig) -> None:
    """Check the length of a run.

    Raises:
        ValueError: Not exactly one of max_steps and max_epochs is given, or no epochs.
    """
    if (t.max_steps is None) == (t.max_epochs is None):
        raise ValueError(
            f"trainer.max_steps={t.max_steps} and trainer.max_epochs={t.max_epochs}: give exactly "
            "one of them"
        )
    if t.max_epochs is not None and t.max_epochs <= 0:
        raise ValueError(f"trainer.max_epochs={t.max_epochs} must be above 0")


def of_this_device(config: DictConfig) -> DictConfig:
    """The recipe with its precision, and the target's, where they follow the device ('auto')."""
    config = config.copy()
    trainer, acceptance = config.trainer, config.acceptance
    trainer.precision = precision_of(trainer.precision, trainer.accelerator)
    if acceptance.dtype == "auto":
        acceptance.dtype = "bfloat16" if trainer.precision.startswith("bf16") else "float32"
    return config


def in_steps(config: DictConfig, module: BaseModule) -> DictConfig:
    """The recipe with its length in steps, so that every row is seen in each of its epochs.

    Args:
        config: The composed recipe.
        module: Gives the tokenizer that packs the rows.

    Returns:
        `config`, or where that has `trainer.max_epochs` a copy that has `trainer.max_steps`.
    """
    epochs = config.trainer.max_epochs
    if epochs is None:
        return config
    rows = build(config.data.train, **with_tokenizer(module.tokenizer, folder=config.data.folder))
    counted = config.copy()
    counted.trainer.max_steps = math.ceil(epochs * len(rows) / config.trainer.batch_size)
    return counted


@rank_zero_only
def describe(config: DictConfig, folder: Path) -> None:
    """Write the resolved config into the run's folder.

    Args:
        config: The composed recipe.
        folder: The run's, which is made.

    Raises:
        ValueError: The folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Whole at once: the other processes of a cluster read it at the same time.
        with atomic_write(folder / "config.yaml") as temporary:
            OmegaConf.save(config, temporary, resolve=True)
    except OSError as error:
        raise ValueError(
            f"cannot write into the run's folder {folder} ({error.strerror}): "
            "choose another folder with runs=..."
        ) from error


def build_module(config: DictConfig) -> BaseModule:
    """The module of a recipe, with its tokenizer, network and target.

    Args:
        config: The composed recipe; tokenizer=null is a model of no language.

    Returns:
        The module.

    Raises:
        ValueError: The recipe's parts do not fit each other, or cannot be loaded.
    """
    tokenizer = None if config.tokenizer is None else build(config.tokenizer)
    if tokenizer is None and config.lora.rank:
        raise ValueError(f"lora.rank={config.lora.rank} is not allowed: only causal LMs take LoRA")
    network = add_lora(
        build(config.network, **with_tokenizer(tokenizer)),
        tokenizer,
        rank=config.lora.rank,
        alpha=config.lora.alpha,
        dropout=config.lora.dropout,
        targets=list(config.lora.targets),
        merge=config.lora.merge,
    )
    module = build(
        config.module,
        network=network,
        tokenizer=tokenizer,
        optimization=Optimization(**config.optimization),
        _convert_="object",
    )
    give_target(module, config)
    return module


def give_target(module: BaseModule, config: DictConfig) -> None:
    """Load the target of a module that needs it, or whose acceptance is measured with it.

    Args:
        module: Takes the target.
        config: The composed recipe; it names the target, or null.

    Raises:
        ValueError: No target for a module that needs one, or one that it cannot draft for; a target
            that every process of a machine would spread over the same GPUs.
    """
    devices = config.trainer.devices
    if config.device_map is not None and module.needs_target and devices != 1:
        raise ValueError(
            f"device_map={config.device_map} with trainer.devices={devices} is not allowed: "
            f"{config.module._target_} reads the target in every step, and every process would "
            "spread its own copy over the same devices. Give trainer.devices=1, or device_map=null"
        )
    if config.target is None:
        if module.needs_target:
            raise ValueError(
                f"target=null, but {config.module._target_} with these settings reads the target's "
                f"{' and '.join(sorted(module.needs_target))}: give target=<folder or Hub id>"
            )
        return
    module.check_target(config.target, config.recipe)
    # Acceptance length is measured on the first process alone, so the others need no copy.
    if module.needs_target or (config.acceptance.prompts and rank_zero_only.rank == 0):
        given = (config.target, config.acceptance.dtype)
        module.attach_target(module.load_target(*given, device_map=config.device_map))


def with_tokenizer(tokenizer: PreTrainedTokenizerBase | None, **given) -> dict:
    """The arguments of a recipe's `_target_`: those given, and the tokenizer where there is one."""
    return given if tokenizer is None else {"tokenizer": tokenizer, **given}


def build_trainer(config: DictConfig, folder: Path, module: BaseModule) -> pl.Trainer:
    """The Lightning trainer of a run, without loggers; steps, not epochs, are its unit.

    Args:
        config: The composed recipe.
        folder: The run's.
        module: What is trained; its tokenizer reads the prompts of acceptance length.

    Returns:
        The trainer, with its callbacks and its number of micro-batches a step.

    Raises:
        ValueError: A strategy or device that this machine does not have, or a batch size that
            processes and micro-batches do not divide.
    """
    t = config.trainer
    callbacks = [
        Checkpoints(folder / "checkpoints", t.checkpoint_every, t.keep_last, t.keep_best),
        RandomStates(),
        LossGuard(factor=t.divergence_factor, wait=t.divergence_wait),
        progress(),
    ]
    a = config.acceptance
    if a.prompts:
        prompts = validation_prompts(a, module.tokenizer)
        callbacks.append(AcceptanceLength(prompts, list(a.temperatures), a.max_new_tokens))
    try:
        trainer = _trainer(config, callbacks)
    except (MisconfigurationException, ImportError, TypeError) as error:
        # A strategy or device that is not to be had here; Lightning has an error for each.
        raise ValueError(" ".join(str(error).split())) from error
    if needs_gpu(trainer.strategy) and not isinstance(trainer.accelerator, CUDAAccelerator):
        given = t.strategy if config.strategy == "auto" else config.strategy
        raise ValueError(
            f"strategy={given} needs a CUDA GPU, and there is none here. "
            "Choose from strategy=ddp and strategy=fsdp2 on a CPU"
        )
    schedule = BatchSchedule(range(0), t.batch_size, t.micro_batch_size, world=trainer.world_size)
    trainer.accumulate_grad_batches = schedule.accumulate
    # Evenly: the last one is at the end, or fewer steps before it than there are validations.
    checks = math.ceil(t.max_steps / t.validate_every)
    trainer.val_check_interval = t.max_steps // checks * schedule.accumulate
    return trainer


def _trainer(config: DictConfig, callbacks: list) -> pl.Trainer:
    t = config.trainer
    return pl.Trainer(
        accelerator=t.accelerator,
        devices=t.devices,
        num_nodes=t.num_nodes,
        strategy=strategy_of(t.strategy),
        precision=t.precision,
        max_steps=t.max_steps,
        gradient_clip_val=t.gradient_clip,
        log_every_n_steps=t.log_every,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        logger=False,
        plugins=[DirectIO()],
        callbacks=callbacks,
        enable_model_summary=False,
    )


def build_loaders(
    config: DictConfig, trainer: pl.Trainer, module: BaseModule, first: int
) -> tuple[WholeSteps, DataLoader]:
    """The training and validation loaders; the order of the data depends on the seed alone.

    Args:
        config: The composed recipe.
        trainer: Gives the process's number and how many there are.
        module: Gives the tokenizer, and the weights of a step.
        first: The step to start at.

    Returns:
        (micro-batches of the steps from `first` on, validation batches).
    """
    t, d = config.trainer, config.data
    corruption = check = None
    if d.corruption is not None:
        given = with_tokenizer(module.tokenizer)
        corruption = build(d.corruption, **given)
        check = build(d.validation_corruption or d.corruption, **given)
    rows = partial(build, **with_tokenizer(module.tokenizer, folder=d.folder))
    train, held_out = rows(d.train), rows(d.validation)
    if d.stored_states is not None:
        train = with_states(train, module, config.target, d.stored_states)
    size = (t.batch_size, t.micro_batch_size, trainer.global_rank, trainer.world_size)
    batches = BatchSchedule(range(first, t.max_steps), *size)
    loader = DataLoader(
        Stream(train, config.seed, corruption), batch_sampler=batches, num_workers=t.workers
    )
    steps = max(1, min(d.validation_rows, len(held_out)) // t.batch_size)
    validation = DataLoader(
        Stream(held_out, config.seed, check), batch_sampler=BatchSchedule(range(steps), *size)
    )
    return WholeSteps(loader, trainer.accumulate_grad_batches, t.max_steps, module), validation


if __name__ == "__main__":
    main(run)
