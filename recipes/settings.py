"""Keys that every recipe has: types, defaults and descriptions, as `--help` shows them."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from data.arguments import Count, Positive, Seed, Several, Temperature, Tokens, Weight, Whole
from models.options import DTYPES
from recipes.options import NEEDED, DeviceMap, option

# Settings of a node that are read only where another one is not off: its key, the value with which
# it is off, and the keys that are read all the same.
SWITCHES: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "acceptance": ("prompts", 0, ("prompts", "dtype")),
    "lora": ("rank", 0, ("rank",)),
}
Below1 = Annotated[float, Field(ge=0, lt=1)]
Decay = Annotated[float, Field(gt=0, lt=1)]
Minutes = Annotated[float, Field(gt=0, le=10**6)]
# Lightning's, by their full names.
PRECISIONS = ("auto", "32-true", "bf16-mixed", "bf16-true", "16-mixed", "16-true", "64-true",
              "transformer-engine", "transformer-engine-float16")  # fmt: skip


class TakenBy:
    """The annotation of a node whose keys are arguments of functions, by their dotted names."""

    def __init__(self, *functions: str):
        self.functions = functions


@dataclass
class Optimization:
    """The settings of AdamW and of its learning-rate schedule."""

    lr: Weight = option(1e-3, "the peak learning rate")
    aux_lr: Weight | None = option(None, "learning rate of auxiliary heads; null: lr")
    weight_decay: Weight = option(0.1, "of matrices; vectors (norms, biases) have none")
    betas: tuple[Below1, Below1] = option((0.9, 0.95), "AdamW's two decay rates")
    warmup_steps: Whole = option(100, "optimizer steps until the peak rate; fewer in a short run")
    schedule: str = option("cosine", "a name of transformers.get_scheduler")
    ema: Decay | None = option(None, "decay of an average of the weights, to be exported")

    def warmup(self, steps: int) -> int:
        """Return the length of the warm-up in a run of `steps` optimizer steps.

        One of more than a quarter of the run, which no published set-up has, becomes a fifth.
        """
        return self.warmup_steps if 4 * self.warmup_steps <= steps else steps // 5


@dataclass(kw_only=True)
class Data:
    """The training data."""

    folder: str = option("${runs}/data", "cache of packed rows")
    train: dict = option(NEEDED, "")
    validation: dict = option(NEEDED, "")
    validation_rows: Count = option(64, "of the validation set, at the most")
    stored_states: Positive | None = option(None, "GB of the target's states on disk; null: none")
    states_engine: Literal["vllm"] | None = option(None, "what makes them; null: this process")
    states_options: dict | None = option(None, "of that engine, such as {threads: 8}")
    corruption: dict | None = option(None, "makes a training sample of a row, such as masking")
    validation_corruption: dict | None = option(None, "null: that of training")

    def __post_init__(self):
        if self.stored_states is None and (self.states_engine or self.states_options):
            raise ValueError(
                "data.states_engine and data.states_options are of states on disk: give "
                "data.stored_states=<GB> too"
            )


@dataclass(kw_only=True)
class Lora:
    """Adapters that are trained instead of all the network's weights."""

    rank: Annotated[int, Field(ge=0, le=65536)] = option(0, "of adapters; 0: train all weights")
    alpha: Positive = option(16, "the scale of adapters is alpha / rank")
    dropout: Below1 = option(0.0, "of the inputs of adapters")
    targets: Several[str] = option(("all-linear",), "or layers, as [q_proj]; not the head")
    merge: bool = option(True, "false: export the adapter only (needs peft)")


@dataclass(kw_only=True)
class Trainer:
    """The length of a run, its devices, and its intervals."""

    max_steps: Count | None = option(1000, "exactly one of the two (or minutes=): steps, or")
    max_epochs: Annotated[float, Field(gt=0)] | None = option(None, "passes over data.train")
    batch_size: Count = option(8, "rows per step, over all processes")
    micro_batch_size: Count = option(8, "rows per forward and process; gradients are accumulated")
    accelerator: str = option("auto", "cpu, gpu, ...; auto: what there is")
    devices: Annotated[int, Field(ge=-1)] = option(1, "processes of a machine; -1: all its GPUs")
    num_nodes: Count = option(1, "machines")
    strategy: str | dict = option("auto", "set by strategy=; or one of Lightning's names")
    precision: Literal[*PRECISIONS] = option(
        "auto", "auto: bf16-mixed where the device has it, else 32-true"
    )
    gradient_clip: Weight | None = option(1.0, "largest norm of the gradient")
    checkpoint_activations: bool = option(False, "recompute activations: slower, far less memory")
    compile: bool = option(False, "torch.compile: faster steps after minutes (how_to/train.md)")
    workers: Annotated[int, Field(ge=0, le=256)] = option(0, "data loader's; each copies the rows")
    log_every: Count = option(10, "steps")
    validate_every: Count = option(500, "steps at the most: validations are evenly spaced")
    checkpoint_every: Count = option(500, "steps")
    keep_last: Count = option(2, "checkpoints")
    keep_best: Whole = option(1, "in addition, by acceptance length, or else by val_loss")
    divergence_factor: Annotated[float, Field(ge=1)] = option(1.5, "largest loss over the lowest")
    divergence_wait: Whole = option(200, "steps before this check begins")

    def __post_init__(self):
        if (self.max_steps is None) == (self.max_epochs is None):
            raise ValueError(
                f"trainer.max_steps={self.max_steps} and trainer.max_epochs={self.max_epochs}: "
                "give exactly one of them"
            )


@dataclass(kw_only=True)
class Acceptance:
    """Acceptance length, measured with the real sampler at every validation."""

    source: str = option("stdlib", "a corpus, a benchmark's file, or the folder of a collection")
    subset: str | None = option(None, "a benchmark's category, or a Hub data set's configuration")
    split: str = option("heldout", "of the source")
    limit: Count | None = option(None, "documents that are read, at the most; null: all")
    chat: bool | None = option(None, "null: in the chat template where the tokenizer has one")
    prompts: Whole = option(8, "0: do not measure")
    prompt_length: Tokens | None = option(None, "tokens; null: 64 of a text, all of a question")
    max_new_tokens: Tokens = option(48, "tokens of an answer")
    temperatures: Several[Temperature] = option((0.0, 1.0), "of the sampling")
    dtype: Literal[*DTYPES] = option("auto", "of the target; auto: as trainer.precision")


@dataclass(kw_only=True)
class Recipe:
    """Keys of both commands."""

    recipe: str = option(NEEDED, "")
    scale: str = option(NEEDED, "")
    name: str | None = option(None, "of another run, in the folder <runs>/<recipe>/<name>")
    runs: str = option("runs", "where runs are")
    seed: Seed = option(0, "of all that is drawn")
    build_inputs: bool = option(False, "run the commands of missing inputs first")
    needs: tuple[dict, ...] = option((), "inputs that must exist: [{path, command, check}]")
    target: str | None = option(None, "the model that is drafted for: folder, Hub id, gguf file")
    device_map: DeviceMap = option(None, "spread the target: auto, or limits as 0:60GiB,cpu:200GiB")


@dataclass(kw_only=True)
class Fit(Recipe):
    """Keys of a recipe of `python -m trainers.fit`."""

    command: str = option("fit", "")
    strategy: str = option("auto", "of training on several processes: a file of recipes/strategy")
    logger: Literal["tensorboard", "wandb"] | None = option(None, "in addition to metrics.csv")
    minutes: Minutes | None = option(
        None, "length of the run here, with the inputs that it builds, in place of max_steps"
    )
    then: tuple[dict, ...] = option((), "commands on the export, in turn: [{path made, command}]")
    resume: str = option("auto", "auto: go on in this folder | never | the path of a checkpoint")
    tokenizer: dict | None = option(NEEDED, "")
    network: dict = option(NEEDED, "")
    module: dict = option(NEEDED, "")
    data: Data = field(default_factory=Data)
    lora: Lora = field(default_factory=Lora)
    optimization: Optimization = field(default_factory=Optimization)
    trainer: Trainer = field(default_factory=Trainer)
    acceptance: Acceptance = field(default_factory=Acceptance)


@dataclass(kw_only=True)
class Collect(Recipe):
    """Keys of a recipe of `python -m decoding.collect`."""

    command: str = option("collect", "")
    collector: dict = option(NEEDED, "")
    prompts: Annotated[
        dict, TakenBy("data.text.prompts.prompt_set", "data.corpora.sources.load_documents")
    ] = option(NEEDED, "")
    shard_size: Annotated[int, Field(ge=1, le=10**6)] = option(64, "prompts per shard")
    minutes: Minutes | None = option(
        None, "end after so many, with the first prompts (at most prompts.count) answered by then"
    )
