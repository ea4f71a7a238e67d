"""`python -m trainers.fit recipe=NAME [scale=paper] [key=value ...]`: train, then export."""

import gc
import logging
import math
import os
import sys
import time
import warnings
from dataclasses import astuple, replace
from functools import cache
from pathlib import Path
from typing import NoReturn

from omegaconf import DictConfig, OmegaConf

from data.files import atomic_write, delete
from recipes.command import main
from recipes.compose import build, compose, run_folder, scales_of
from recipes.folders import claimed
from recipes.inputs import (
    check_collections,
    check_first,
    follow_up,
    named_commands,
    prepare_inputs,
)
from recipes.settings import Acceptance, Data, Optimization, Trainer

check_first(__name__, "fit")

import pytorch_lightning as pl
import torch
from pytorch_lightning.accelerators import CUDAAccelerator
from pytorch_lightning.callbacks import Callback, LambdaCallback
from pytorch_lightning.plugins.environments import TorchElasticEnvironment
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from pytorch_lightning.utilities.rank_zero import rank_zero_only
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers import PreTrainedTokenizerBase

from data.rows.stream import BatchSchedule, OnceEach, Stream
from models.attention import GROUPED, WRITTEN_OUT, fused_attention, switch_attention
from models.placement import input_device
from trainers.base import BaseModule, WholeSteps
from trainers.lora import add_lora
from trainers.publishing.export_folder import check_exportable, is_export, write_export
from trainers.runs.callbacks import AcceptanceLength, validation_prompts
from trainers.runs.checkpoint_files import DirectIO, check_fits, check_room, check_strategy
from trainers.runs.checkpoints import Checkpoints
from trainers.runs.guards import LossGuard, memory_advice
from trainers.runs.length import SKIPPED, TIMED, Seconds, Stopwatch, plan
from trainers.runs.loggers import build_loggers, check_logger
from trainers.runs.progress import Progress
from trainers.runs.provenance import (
    check_finished,
    check_inputs,
    chosen_layers,
    provenance,
    write_provenance,
)
from trainers.runs.randomness import RandomStates
from trainers.runs.restorable import check_restorable
from trainers.runs.resume import checkpoint_to_resume, with_stored_steps
from trainers.runs.set_aside import MEASURED, drop_set_aside, set_aside
from trainers.runs.signals import Preempted, Signals
from trainers.runs.stored_states import with_states
from trainers.strategies import needs_gpu, precision_of, strategy_of, whole_network


def run(argv: list[str]) -> None:
    """Run the command with its arguments `key=value`."""
    # The libraries' chatter is for people who write their code, not for those who run a recipe.
    warnings.filterwarnings("ignore", module="pytorch_lightning")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    config = compose(argv, "fit")
    if not any(a.startswith(("scale=", "trainer.devices=")) for a in argv):
        say_what_was_chosen(config)
    fit(config)


@rank_zero_only
def say_what_was_chosen(config: DictConfig) -> None:
    """Print the default scale and devices, if a user chose none, and how to change them."""
    gpus, devices = torch.cuda.device_count(), config.trainer.devices
    here, more = "the CPU", ""
    if gpus and config.trainer.accelerator != "cpu":
        here = f"{gpus if devices == -1 else devices} of the {gpus} GPUs here"
        more = f", or trainer.devices={gpus}" if 0 < devices < gpus else ""
    others = "|".join(s for s in scales_of(config.recipe) if s != config.scale)
    given = f"scale={others}" if others else "other settings"
    print(f"chosen: scale={config.scale}, on {here}; to have another give {given}{more}")


def fit(config: DictConfig) -> Path:
    """Train a composed recipe, or resume its run, and return the folder of its export.

    A signal asks for a checkpoint and then raises SystemExit(128 + the signal's number).
    """
    check_logger(config.logger)
    config = resolve_precision(config)
    folder = run_folder(config)
    config = with_stored_steps(config, folder)
    Data(**config.data)  # raises now, not after the inputs are made
    if not _to_be_measured(config):
        Trainer(**config.trainer)  # so here
    with claimed(folder), memory_advice(config):
        export = folder / "export"
        checkpoint, first = checkpoint_to_resume(config, folder)
        if checkpoint is None and is_export(export) and config.resume == "auto":
            check_finished(config, folder)
            print(f"{export} is there already: resume=never trains it anew, name=... beside it")
        else:
            _fit(config, folder, checkpoint, first)
    rank_zero_only(follow_up)(config.then, folder)
    return export


def _fit(config: DictConfig, folder: Path, checkpoint: Path | None, first: int) -> None:
    """Train and export a recipe in a run's folder, from a checkpoint or a step on."""
    began = time.perf_counter()
    check_collections(config)
    prepare_inputs(config.needs, config.build_inputs)
    layers = None if checkpoint is None else chosen_layers(checkpoint.parent.parent)
    if _to_be_measured(config):
        config, layers = in_minutes(config, folder, began)
    pl.seed_everything(config.seed, verbose=False)
    with named_commands(config.needs):
        module = build_module(config, layers)
        check_exportable(module)
        if checkpoint is not None and config.resume not in ("auto", "never"):
            check_fits(module, checkpoint)
        trainer, loaders, rows = assemble(config, module, folder, first)
    start = provenance(config, module.network, trainer, rows, first)
    if checkpoint is not None:
        check_strategy(checkpoint, trainer, config.strategy)
        check_inputs(start, checkpoint, chosen=config.resume != "auto")
        if checkpoint.is_file():
            check_restorable(trainer, module, checkpoint)
    steps = trainer.max_steps
    t, left = config.trainer, steps - first
    written = left and math.ceil(left / t.checkpoint_every) + t.keep_best
    check_room(folder / "checkpoints", module, written, t.keep_last + t.keep_best)

    @cache
    def begin() -> None:
        """Write into the folder, once no process and no library refuses the run any more."""
        set_aside(folder, first, checkpoint)
        describe(config, folder)
        trainer.loggers = build_loggers(config, folder, first)
        write_provenance(folder / "provenance.json", start, resumed=checkpoint is not None)
        if trainer.is_global_zero:
            epochs = config.trainer.max_epochs
            passes = "" if epochs is None else f" ({epochs:g} epochs of {len(rows['train'])} rows)"
            warmup = module.optimization.warmup(steps)
            length = f"{steps} steps{passes}, {warmup} of them to warm up"
            if warmup < (asked := module.optimization.warmup_steps):
                length += f" (not {asked} in so short a run)"
            if checkpoint is not None:
                length = f"goes on at step {first} of {length}, with {checkpoint}"
            print(f"{config.recipe} at scale {config.scale}: {length}, to {folder}")

    trainer.callbacks.insert(0, LambdaCallback(on_train_start=lambda *_: begin()))
    try:
        trainer.fit(module, *loaders, ckpt_path=checkpoint, weights_only=True)
    except Preempted as signal:
        _stop(signal, f"at step {trainer.global_step}")
    begin()  # where no step was left
    if trainer.global_step < steps:  # interrupted: nothing to export
        raise ValueError(f"stopped at step {trainer.global_step}: go on with the same command")
    export_run(module, trainer, folder, merge=config.lora.merge)


@rank_zero_only
def _say(text: str) -> None:
    print(text, flush=True)


def _stop(signal: Preempted, where: str) -> NoReturn:
    """Exit as a signal asks, and say how to go on."""
    _say(f"{signal} {where}: go on with the same command")
    gc.freeze()  # as `recipes.command.call` does: who stops a run waits for its process's end
    sys.exit(128 + signal.number)


def _to_be_measured(config: DictConfig) -> bool:
    """Return whether a run's steps are to follow from its minutes."""
    return config.minutes is not None and config.trainer.max_steps is None


def in_minutes(
    config: DictConfig, folder: Path, began: float
) -> tuple[DictConfig, list[int] | None]:
    """Return a recipe with the steps and validations that `minutes` come to here.

    With it come the layers that its network was made of, which are chosen once. The minutes began
    at `began`, by `time.perf_counter`.

    They follow from a short run with all that the real one has. Nothing of it is kept: the real one
    begins as if it had been given these steps.
    """
    short, scratch = config.copy(), folder / MEASURED
    few = SKIPPED + TIMED
    short.trainer.update(max_steps=few, validate_every=few, checkpoint_every=few, keep_best=0)
    short.data.validation_rows = min(config.data.validation_rows, config.trainer.batch_size)
    short.acceptance.prompts = min(config.acceptance.prompts, 1)
    _say(f"minutes={config.minutes:g}: {few} steps, a validation and a checkpoint are timed first")
    try:
        found, layers = _measured(short, scratch, began)
    except Preempted as signal:
        _stop(signal, "while steps were timed")
    finally:
        rank_zero_only(delete)(scratch)
    gc.collect()  # its weights, before they are there again
    torch.compiler.reset()
    t, rows, prompts = config.trainer, config.data.validation_rows, config.acceptance.prompts
    run = plan(config.minutes, found, t.validate_every, t.checkpoint_every, rows, prompts)
    config = config.copy()
    config.trainer.update(max_steps=run.steps, validate_every=run.every)
    config.data.validation_rows, config.acceptance.prompts = run.rows, run.prompts
    checks = math.ceil(run.steps / run.every)
    fewer = f", of {run.rows} rows and {run.prompts} prompts" if run.rows < rows else ""
    _say(
        f"minutes={config.minutes:g}: {run.steps} steps of {found.step:.2g} s, "
        f"{checks} validation{'s' * (checks > 1)} of {run.validation:.2g} s{fewer}"
    )
    return config, layers


def _measured(config: DictConfig, folder: Path, began: float) -> tuple[Seconds, list[int] | None]:
    """Time the first steps of a run, a validation and a checkpoint: the same on all processes."""
    built = time.perf_counter()
    pl.seed_everything(config.seed, verbose=False)
    with named_commands(config.needs):
        module = build_module(config)
        check_exportable(module)
        trainer, loaders, _ = assemble(config, module, folder, first=0)
    if copied := getattr(module.network, "copied", None):
        built += copied.seconds  # the run itself is given these layers
    watch = Stopwatch()
    trainer.callbacks = [watch, *(c for c in trainer.callbacks if not isinstance(c, Progress))]
    trainer.fit(module, *loaders)
    if trainer.global_step < trainer.max_steps:
        raise ValueError("stopped while steps were timed: give the same command again")
    rows, prompts = config.data.validation_rows, config.acceptance.prompts
    watched = watch.seconds(rows, prompts, began, built)
    found = Seconds(*trainer.strategy.broadcast(astuple(watched)))
    return found, copied and copied.layers


def export_run(module: BaseModule, trainer: pl.Trainer, folder: Path, merge: bool) -> None:
    """Export a trained module into its run's folder, on the first process."""
    with whole_network(module), fused_attention(module.network):
        if trainer.is_global_zero:
            if module.target is not None:  # Lightning has moved the module to the CPU, not these
                module.to(input_device(module.target))
            with module.averaged():
                write_export(module, folder / "export", folder, trainer.global_step, merge)
            drop_set_aside(folder)
            print(f"exported to {folder / 'export'}")


def resolve_precision(config: DictConfig) -> DictConfig:
    """Return the recipe with the device's precision where 'auto' is set, also for the target."""
    config = config.copy()
    trainer, acceptance = config.trainer, config.acceptance
    trainer.precision = precision_of(trainer.precision, trainer.accelerator)
    if acceptance.dtype == "auto":
        acceptance.dtype = "bfloat16" if trainer.precision.startswith("bf16") else "float32"
    return config


@rank_zero_only
def describe(config: DictConfig, folder: Path) -> None:
    """Write the resolved config into a run's folder, and make the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    # Whole at once: the other processes of a cluster read it at the same time.
    with atomic_write(folder / "config.yaml") as temporary:
        OmegaConf.save(config, temporary, resolve=True)


def build_module(config: DictConfig, layers: list[int] | None = None) -> BaseModule:
    """Build a recipe's module with its tokenizer (null: no language model), network and target.

    `layers` are those that a network takes from its source, where they were chosen before for the
    number of them that the recipe has.
    """
    tokenizer = None if config.tokenizer is None else build(config.tokenizer)
    if tokenizer is None and config.lora.rank:
        raise ValueError(f"lora.rank={config.lora.rank} is not allowed: only causal LMs take LoRA")
    chosen = {}
    if layers is not None and OmegaConf.select(config, "network.layers") == len(layers):
        chosen = {"layers": layers}
    network = build(config.network, **with_tokenizer(tokenizer), **chosen)
    module = build(
        config.module,
        network=add_lora(network, tokenizer, **OmegaConf.to_container(config.lora, resolve=True)),
        tokenizer=tokenizer,
        optimization=Optimization(**config.optimization),
        _convert_="object",
    )
    give_target(
        module,
        config.target,
        recipe=config.recipe,
        dtype=config.acceptance.dtype,
        measured=config.acceptance.prompts > 0,
        device_map=config.device_map,
        devices=config.trainer.devices,
    )
    return module


def give_target(
    module: BaseModule,
    target: str | None,
    *,
    recipe: str,
    dtype: str,
    measured: bool,
    device_map: str | None = None,
    devices: int = 1,
) -> None:
    """Load the target of a module that needs it, or whose acceptance is measured with it."""
    needs = module.needs_target
    name = f"{type(module).__module__}.{type(module).__name__}"
    if device_map is not None and needs and devices != 1:
        raise ValueError(
            f"device_map={device_map} with trainer.devices={devices} is not allowed: "
            f"{name} reads the target in every step, and every process would "
            "spread its own copy over the same devices. Give trainer.devices=1, or device_map=null"
        )
    if target is None:
        if needs:
            raise ValueError(
                f"target=null, but {name} with these settings reads the target's "
                f"{' and '.join(sorted(needs))}: give target=<folder or Hub id>"
            )
        return
    module.check_target(target, recipe)
    # Acceptance length is measured on the first process alone, so the others need no copy.
    if needs or (measured and rank_zero_only.rank == 0):
        module.attach_target(module.load_target(target, dtype, device_map=device_map))


def with_tokenizer(tokenizer: PreTrainedTokenizerBase | None, **given) -> dict:
    """Return a `_target_`'s arguments: those given, and the tokenizer if there is one."""
    return given if tokenizer is None else {"tokenizer": tokenizer, **given}


def assemble(
    config: DictConfig, module: BaseModule, folder: Path, first: int
) -> tuple[pl.Trainer, tuple[WholeSteps, DataLoader], dict[str, Dataset]]:
    """Build a run from step `first`: trainer (no loggers), (train, validation) loaders, rows."""
    data, given, t = config.data, with_tokenizer(module.tokenizer), Trainer(**config.trainer)
    # Its prompts are read here: what is wrong with them is said before rows are packed.
    callbacks = build_callbacks(t, Acceptance(**config.acceptance), module, folder)
    train = build(data.train, folder=data.folder, **given)
    held_out = build(data.validation, folder=data.folder, **given)
    check_ids(module, train, held_out)
    if t.max_epochs is not None:
        steps = math.ceil(t.max_epochs * len(train) / t.batch_size)
        t = replace(t, max_steps=steps, max_epochs=None)
    assert t.max_steps is not None
    trainer = build_trainer(t, config.strategy, callbacks)
    module.check_strategy(trainer.strategy)
    speed_up(module, trainer, t)
    if data.stored_states is not None:
        engine = data.states_engine and {
            "engine": data.states_engine,
            **(data.states_options or {}),
        }
        train = with_states(train, module, config.target, data.stored_states, engine)
    noise = data.corruption and build(data.corruption, **given)
    check = data.corruption and build(data.validation_corruption or data.corruption, **given)
    size = (t.batch_size, t.micro_batch_size, trainer.global_rank, trainer.world_size)
    batches = BatchSchedule(range(first, t.max_steps), *size)
    noised = Stream(train, config.seed, noise)
    loader = DataLoader(noised, batch_sampler=batches, num_workers=t.workers)
    loader = WholeSteps(loader, trainer.accumulate_grad_batches, t.max_steps, module)
    number = min(data.validation_rows, len(held_out))
    once = OnceEach(number, t.micro_batch_size, trainer.global_rank, trainer.world_size)
    validation = DataLoader(Stream(held_out, config.seed, check), batch_sampler=once)
    return trainer, (loader, validation), {"train": train, "validation": held_out}


def check_ids(module: BaseModule, *rows: Dataset) -> None:
    """Raise ValueError if rows have token ids that the target, or else the network, lacks."""
    largest = max(getattr(found, "largest_id", -1) for found in rows)
    own = module.target is None and getattr(module, "draft_ids", None) is not None
    if largest < 0 or own:  # no tokens, or a network with other ids than the rows
        return
    known = (module.target or module.network).config.get_text_config().vocab_size
    if largest >= known:
        raise ValueError(
            f"the rows have the token id {largest}, and the model knows 0 to {known - 1}: their "
            "source is damaged, or was made for another model"
        )


def build_callbacks(
    t: Trainer, acceptance: Acceptance, module: BaseModule, folder: Path
) -> list[Callback]:
    """Build the callbacks of a run: checkpoints, guards, progress, acceptance length, signals."""
    signals, checkpoints = Signals(), folder / "checkpoints"
    callbacks = [
        Checkpoints(checkpoints, signals, t.checkpoint_every, t.keep_last, t.keep_best),
        RandomStates(),
        LossGuard(factor=t.divergence_factor, wait=t.divergence_wait),
        Progress(),
    ]
    if acceptance.prompts:
        prompts = validation_prompts(acceptance, module.tokenizer)
        temperatures = list(acceptance.temperatures)
        most = acceptance.max_new_tokens
        callbacks.append(AcceptanceLength(prompts, temperatures, most, signals))
    return [*callbacks, signals]


def speed_up(module: BaseModule, trainer: pl.Trainer, t: Trainer) -> None:
    """Choose a CPU's attention; compile a network and checkpoint its activations, as set."""
    if t.checkpoint_activations:
        module.network.gradient_checkpointing_enable({"use_reentrant": False})
    if trainer.strategy.root_device.type == "cpu":
        switch_attention(module.network, WRITTEN_OUT if t.compile else GROUPED)
    if t.compile:
        module.network.compile()


def build_trainer(t: Trainer, strategy: str, callbacks: list[Callback]) -> pl.Trainer:
    """Build the Lightning trainer of a run, without loggers; steps, not epochs, are its unit."""
    try:
        trainer = pl.Trainer(
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
    except (MisconfigurationException, ImportError, TypeError) as error:
        # A strategy or device that is not to be had here; Lightning has an error for each.
        raise ValueError(" ".join(str(error).split())) from error
    if needs_gpu(trainer.strategy) and not isinstance(trainer.accelerator, CUDAAccelerator):
        given = t.strategy if strategy == "auto" else strategy
        raise ValueError(
            f"strategy={given} needs a CUDA GPU, and there is none here. "
            "Choose from strategy=ddp and strategy=fsdp2 on a CPU"
        )
    check_launched(trainer)
    # A cast would round what is no network's input: weights, rates, probabilities, noise.
    trainer.precision_plugin.convert_input = as_it_is  # type: ignore[method-assign]
    schedule = BatchSchedule(range(0), t.batch_size, t.micro_batch_size, world=trainer.world_size)
    trainer.accumulate_grad_batches = schedule.accumulate
    # Evenly: the last one is at the end, or fewer steps before it than there are validations.
    checks = math.ceil(trainer.max_steps / t.validate_every)
    trainer.val_check_interval = trainer.max_steps // checks * schedule.accumulate
    return trainer


def as_it_is(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a batch; a network casts its own inputs."""
    return batch


def check_launched(trainer: pl.Trainer) -> None:
    """Raise ValueError if torchrun or srun has started another number of processes."""
    torchrun = TorchElasticEnvironment.detect()
    started = os.environ.get("WORLD_SIZE" if torchrun else "SLURM_STEP_NUM_TASKS")
    asked = trainer.num_devices * trainer.num_nodes
    if started is not None and int(started) != asked:
        raise ValueError(
            f"trainer.devices={trainer.num_devices} and trainer.num_nodes={trainer.num_nodes} ask "
            f"for {asked} processes, but {'torchrun' if torchrun else 'srun'} has "
            f"started {started}: give trainer.devices=<processes of a machine> and "
            "trainer.num_nodes=<machines>"
        )


if __name__ == "__main__":
    main(run)
