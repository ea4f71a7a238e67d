"""Options: the fields of a command's dataclass, each with its description and what it may be.

The dataclasses here hold the options that several commands share, so that a key has one name, one
default and one check wherever it stands.
"""

import math
import re
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from decoding.commands.values import show, unknown

NEEDED = MISSING  # the default of an option that must be given
DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
DEVICES = ("cpu", "cuda", "mps", "xpu")  # with a number behind, as cuda:1, too


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
        default: its value where none is given; `NEEDED` where one must be.
        help: one line for `--help`, without the default.
        choices: the only values, of each item of a list.
        least: the smallest value, of each item of a list.
        empty: of a list whose default has items: whether it may have none.
        verbatim: of text: quotes around it belong to it.
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
    """Base of a command's dataclass: every field is checked by what its `option` says."""

    def __post_init__(self):
        for f in fields(self):
            check(f.name, getattr(self, f.name), **f.metadata)


def check(
    key: str,
    value: Any,
    *,
    choices: tuple[str, ...] = (),
    least: float | None = None,
    some: bool = False,
    **_,
) -> None:
    """ValueError if an option's value is not allowed (see `option`)."""
    several = isinstance(value, (tuple, list))
    if some and not value:
        raise ValueError(f"{key}=[] is not allowed: at least one item is needed")
    for item in value if several else () if value is None else (value,):
        name = re.sub(r":\d+$", "", item) if choices is DEVICES else item
        if choices and name not in choices:
            raise unknown(key, item, choices)
        if isinstance(item, float) and not math.isfinite(item):
            raise ValueError(f"{key}={show(value)} is not allowed: it must be a finite number")
        if least is not None and item < least:
            each = "each " if several else ""
            given = list(value) if several else item
            raise ValueError(f"{key}={given} is not allowed: {each}at least {least}")


def check_batch_sizes(batch_sizes: tuple[int, ...], prompts: int) -> None:
    """ValueError if one of the batches is empty or larger than the number of prompts."""
    for size in batch_sizes:
        if not 1 <= size <= prompts:
            raise ValueError(
                f"batch_sizes={list(batch_sizes)} with prompts={prompts} is not allowed: "
                "a batch has at least one prompt and not more than there are"
            )


@dataclass(frozen=True, kw_only=True)
class ModelOptions(Options):
    """A model, and how it is loaded."""

    model: str = option(NEEDED, "an exported folder or a Hub id")
    dtype: str = option("bfloat16", "of the weights in memory", choices=DTYPES)
    device: str = option("cpu", "where it runs; cuda:1 is the second GPU", choices=DEVICES)


@dataclass(frozen=True, kw_only=True)
class MeasureOptions(ModelOptions):
    """Something that is measured of a model."""

    seed: int = option(0, "of all that is drawn")
    out: str | None = option(None, "folder of the results; null: one beside the export")


@dataclass(frozen=True, kw_only=True)
class PromptOptions(MeasureOptions):
    """Something that is measured of a model on held-out prompts."""

    source: str = option("stdlib", "of the prompts: 'stdlib', a text folder or a JSONL of prompts")
    prompts: int = option(64, "how many held-out prompts", least=1)
    prompt_length: int = option(64, "tokens of a prompt, at the most", least=1)
    max_new_tokens: int = option(128, "tokens of an answer, at the most", least=1)
