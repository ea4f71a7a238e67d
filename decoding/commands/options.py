"""Options: the fields of a command's dataclass, each with a description and its allowed values.

The dataclasses here hold the options that several commands share, so that a key has one name, one
default and one check in every command.
"""

import functools
import math
from dataclasses import MISSING, dataclass, field, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

from decoding.commands.values import show, unknown
from models.placement import DTYPES, check_device, loading_options

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
LARGEST, SEEDS = 2**31 - 1, 2**64 - 1  # integers; those of seeds
NEEDED = MISSING  # the default of an option that must be given
DEVICES = ("cpu", "cuda", "mps", "xpu")  # also with a number, as cuda:1


def option(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] = (),
    least: float | None = None,
    empty: bool = False,
    verbatim: bool = False,
):
    """A field of a command's dataclass.

    Args:
        default: Its value where none is given; `NEEDED` where one must be.
        help: One line for `--help`, without the default.
        choices: The allowed values, of a list those of each item.
        least: The smallest allowed value, of a list that of each item.
        empty: Whether a list whose default has items may have none.
        verbatim: Whether quotes around a text belong to it.
    """
    some = isinstance(default, tuple) and default != () and not empty
    metadata = {
        "help": help,
        "choices": choices,
        "least": least,
        "some": some,
        "verbatim": verbatim,
    }
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Base of a command's dataclass: checks every field by its `option`.

    Where that names no largest value, `limits` of the keys of recipes holds: names are the same.
    """

    def __post_init__(self):
        for f in fields(self):
            check(f.name, getattr(self, f.name), **f.metadata)
            check_limits(getattr(self, f.name), f.name, least=False)


def check(
    key: str,
    value: Any,
    *,
    choices: tuple[str, ...] = (),
    least: float | None = None,
    most: float | None = None,
    some: bool = False,
    **_,
) -> None:
    """Check an option's value.

    Args:
        key: For the error.
        value: The value, or a list of values.
        choices: The allowed values.
        least: The smallest allowed value.
        most: The largest allowed value; None: of integers `LARGEST`, or of seeds `SEEDS`.
        some: Whether a list must have items.

    Raises:
        ValueError: The value is not allowed.
    """
    several = isinstance(value, (tuple, list))
    if some and several and not value:
        raise ValueError(f"{key}=[] is not allowed: at least one item is needed")
    for item in value if several else () if value is None else (value,):
        if choices is DEVICES:
            check_device(item)
        elif choices and item not in choices:
            raise unknown(key, item, choices)
        if isinstance(item, float) and not math.isfinite(item):
            raise ValueError(f"{key}={show(value)} is not allowed: it must be a finite number")
        limit = most
        if limit is None and type(item) is int:
            limit = SEEDS if key.rpartition(".")[2] == "seed" else LARGEST
        each = "each " if several else ""
        if least is not None and item < least:
            raise ValueError(f"{key}={show(value)} is not allowed: {each}at least {least}")
        if limit is not None and abs(item) > limit:
            raise ValueError(f"{key}={show(value)} is not allowed: {each}at most {limit}")


@functools.cache
def limits() -> dict[str, tuple[float | None, float | None]]:
    """The least and the most value of the keys that a pattern fits (`recipes/limits.yaml`)."""
    file = RECIPES / "limits.yaml"
    return {k: tuple(v) for k, v in yaml.safe_load(file.read_text("utf-8")).items()}


def check_limits(values: Any, key: str = "", least: bool = True) -> None:
    """Check the numbers of a config, or of a command's option, against `limits`.

    Args:
        values: Nodes, lists and values.
        key: The dotted path of `values`.
        least: Whether the smallest values hold, too.

    Raises:
        ValueError: A number is too small or too large; the line names its key.
    """
    if isinstance(values, dict):
        for name, value in values.items():
            check_limits(value, f"{key}.{name}" if key else str(name), least)
        return
    several = isinstance(values, (list, tuple))
    numbers = [v for v in (values if several else [values]) if type(v) in (int, float)]
    if numbers:
        for pattern, (smallest, most) in limits().items():
            if fnmatchcase(key, pattern) or fnmatchcase(f".{key}", pattern):
                given = numbers if several else numbers[0]
                check(key, given, least=smallest if least else None, most=most)


def check_batch_sizes(batch_sizes: tuple[int, ...], prompts: int) -> None:
    """Check that every batch size is at least 1 and at most the number of prompts.

    Raises:
        ValueError: One is not.
    """
    for size in batch_sizes:
        if not 1 <= size <= prompts:
            raise ValueError(
                f"batch_sizes={list(batch_sizes)} with prompts={prompts} is not allowed: "
                "a batch has at least one prompt and not more than there are"
            )


@dataclass(frozen=True, kw_only=True)
class ModelOptions(Options):
    """The model of a command, and how it is loaded."""

    model: str = option(NEEDED, "an exported folder, a Hub id or a gguf file")
    dtype: str = option("bfloat16", "of the weights in memory", choices=DTYPES)
    device: str = option("cpu", "where it runs; cuda:1 is the second GPU", choices=DEVICES)
    device_map: str | None = option(
        None, "spread the target: auto, or limits such as 0:60GiB,cpu:200GiB"
    )

    def __post_init__(self):
        super().__post_init__()
        loading_options(self.device_map)  # raises now, not after the texts are read

    @property
    def placing(self) -> dict:
        """Arguments of `decoding.load`: type and place of the weights."""
        return {name: getattr(self, name) for name in ("dtype", "device", "device_map")}


@dataclass(frozen=True, kw_only=True)
class LoadOptions(ModelOptions):
    """Options of a command that decodes with one export, as it is or otherwise."""

    target: str | None = option(None, "a target instead of the one that the export names")
    sampler: tuple[str, ...] = option(
        (), "another method or other knobs than the export's, as [method=jacobi,block_size=32]"
    )
    dtype: str = option("auto", "of the weights in memory", choices=DTYPES)
    trust_remote_code: bool = option(False, "run the code that a model of the Hub brings")

    @property
    def loading(self) -> dict:
        """Arguments of `decoding.load`, without the model."""
        names = ("target", "sampler", "trust_remote_code")
        return self.placing | {name: getattr(self, name) for name in names}


@dataclass(frozen=True, kw_only=True)
class MeasureOptions(ModelOptions):
    """Options of a command that measures a model."""

    seed: int = option(0, "of all that is drawn")
    out: str | None = option(None, "folder of the results; null: one beside the export")


@dataclass(frozen=True, kw_only=True)
class SourceOptions(MeasureOptions):
    """Options of a command that measures a model on held-out texts."""

    source: str = option("stdlib", "'stdlib', a text folder, a benchmark's file or a Hub data set")
    subset: str | None = option(None, "one category of a benchmark, or a Hub data set's own name")
    split: str = option("heldout", "of the source; a benchmark has none, but GSM8K: 'test' is all")
    limit: int | None = option(
        None, "documents of the source that are read, at the most; null: all", least=1
    )


@dataclass(frozen=True, kw_only=True)
class ChatOptions(MeasureOptions):
    """Options of a command that asks a model questions."""

    chat: bool | None = option(None, "ask in the chat template; null: where the model has one")


@dataclass(frozen=True, kw_only=True)
class PromptOptions(SourceOptions, ChatOptions):
    """Options of a command that measures a model on held-out prompts."""

    prompts: int = option(64, "how many held-out prompts", least=1)
    prompt_length: int | None = option(
        None, "tokens of a prompt, at the most; null: 64 of a text, all of a question", least=1
    )
    max_new_tokens: int = option(128, "tokens of an answer, at the most", least=1)
    ignore_eos: bool = option(False, "go on after end-of-text, to max_new_tokens")

    @property
    def prompt_set(self) -> dict:
        """Arguments of `data.text.prompts.heldout_prompts`, without the tokenizer."""
        return {
            "source": self.source,
            "count": self.prompts,
            "length": self.prompt_length,
            "split": self.split,
            "chat": self.chat,
            "subset": self.subset,
            "limit": self.limit,
        }
