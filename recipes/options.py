"""Options of commands: typed fields of a dataclass, read from `key=value` and shown by `--help`.

pydantic checks an option's type (`Annotated[int, Field(ge=1)]`, `Literal["a", "b"]`). Options that
several commands share are here, so that a key has one name, default and type everywhere.
"""

import functools
import inspect
import re
import shlex
import sys
import typing
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator

from data.arguments import Count, Seed, Tokens
from models.options import DTYPES, check_device, check_there, loading_options
from recipes.command import Line, asked, call, help_page
from recipes.values import VERBATIM, check, convert, split, unknown

PROMPTS = 64  # that a command measures on, where none are given
NEEDED = MISSING  # the default of an option that must be given
Verbatim = Annotated[str, VERBATIM]


def _checked_by(function):
    """Return the annotation of a text that a function checks."""
    return Annotated[str, AfterValidator(lambda text: [function(text), text][1])]


Device = _checked_by(check_device)
DeviceMap = _checked_by(loading_options) | None


def option(default: Any, help: str, needs: str | None = None):
    """Return a field of a command's dataclass; `help` is its line in `--help`.

    `needs` is another option without which it is not read; it is refused then.
    """
    return field(default=default, metadata={"help": help, "needs": needs})


@functools.cache
def types_of(into: type) -> dict[str, Any]:
    """Return the types of a dataclass's fields, by name."""
    hints = typing.get_type_hints(into, include_extras=True)
    return {f.name: hints[f.name] for f in fields(into)}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Base of a command's dataclass: checks every field by its type."""

    def __post_init__(self):
        for name, hint in types_of(type(self)).items():
            check(name, getattr(self, name), hint)

    def check_inputs(self) -> None:
        """Raise ValueError for an input that is not there, as far as a look at the files tells."""


def check_first(name: str, read: Callable[[list[str]], Options]) -> None:
    """Check a command line before the rest of the command's module is imported.

    torch and transformers take seconds, so a module of a command has its options first, then this
    call with its `__name__` and the function that reads them, and then its other imports. A
    mistake, --help and --cfg job end the process here.
    """
    if name == "__main__":
        call(lambda argv: read(argv).check_inputs())


def parse(argv: list[str], into: type, command: str):
    """Return a command's options, from arguments `key=value`, as the dataclass `into`.

    `--help` and `--cfg job` print and exit with status 0. An EXAMPLE of `into` is one call's
    arguments.
    """
    wish, pairs = asked(argv)
    hints = types_of(into)
    defaults = {f.name: f.default for f in fields(into)}
    helps = _helps(into)
    if wish == "help":
        lines = [Line(name, defaults[name], hint, helps[name]) for name, hint in hints.items()]
        lines.sort(key=lambda line: line.default is not MISSING)
        print(help_page(command, inspect.getdoc(into) or "", lines, getattr(into, "EXAMPLE", "")))
        sys.exit(0)
    given = dict(defaults)
    for argument in pairs:
        key, text = split(argument)
        if key not in hints:
            raise unknown("key", key, hints)
        given[key] = convert(key, text, hints[key], defaults[key])
    for f in fields(into):
        needed = f.metadata.get("needs")
        if needed and given[f.name] != f.default and not given[needed]:
            raise ValueError(
                f"{f.name}= is not read without {needed}=: give that too, or leave {f.name}= out"
            )
    if wish == "config":
        plain = {k: list(v) if isinstance(v, tuple) else v for k, v in given.items()}
        plain |= {name: "???" for name, value in given.items() if value is MISSING}
        print(yaml.safe_dump(plain, sort_keys=False, allow_unicode=True), end="")
        sys.exit(0)
    for name, value in given.items():
        if value is MISSING:
            rest = f" {shlex.join(pairs)}" if pairs else ""
            about = helps[name] and f" ({helps[name]})"
            raise ValueError(f"{name}= is missing{about}: python -m {command} {name}=...{rest}")
    return into(**given)


def _helps(into: type) -> dict[str, str]:
    """Return every field's description.

    A class shared with other packages (`SamplingParams`) has them in its docstring, as `name:
    text`.
    """
    found = dict.fromkeys(types_of(into), "")
    for owner in reversed(into.__mro__):
        for name, text in re.findall(
            r"^ *(\w+): (.+(?:\n {4,}(?!\w+: ).+)*)", inspect.getdoc(owner) or "", re.MULTILINE
        ):
            found[name] = " ".join(text.split())
    return found | {f.name: f.metadata["help"] for f in fields(into) if "help" in f.metadata}


def check_batch_sizes(batch_sizes: tuple[int, ...], prompts: int) -> None:
    """Check that every batch size is at least 1 and at most the number of prompts."""
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
    dtype: Literal[*DTYPES] = option("bfloat16", "of the weights in memory")
    device: Device = option("cpu", "cpu, cuda, mps or xpu; cuda:1 is the second GPU")
    device_map: DeviceMap = option(None, "spread the target: auto, or limits as 0:60GiB,cpu:200GiB")

    def check_inputs(self) -> None:
        check_there(self.model)

    @property
    def placing(self) -> dict:
        """Return the arguments of `decoding.load` for the weights' type and device."""
        return {name: getattr(self, name) for name in ("dtype", "device", "device_map")}


@dataclass(frozen=True, kw_only=True)
class SamplerOptions(ModelOptions):
    """The sampler of an export, with other knobs than its own."""

    sampler: tuple[str, ...] = option((), "another method or knobs, as [method=jacobi]")
    trust_remote_code: bool = option(False, "run the code that a model of the Hub brings")


@dataclass(frozen=True, kw_only=True)
class LoadOptions(SamplerOptions):
    """Options of a command that decodes with one export."""

    target: str | None = option(None, "a target instead of the one that the export names")
    dtype: Literal[*DTYPES] = option("auto", "of the weights in memory")

    @property
    def loading(self) -> dict:
        """Return the arguments of `decoding.load`, without the model."""
        names = ("target", "sampler", "trust_remote_code")
        return self.placing | {name: getattr(self, name) for name in names}


@dataclass(frozen=True, kw_only=True)
class AnswerOptions(LoadOptions):
    """Options of a command that answers with the sampling that a model names."""

    generation_config: Literal["auto", "ignore"] = option(
        "auto", "what a request does not name is as the model's file says; ignore: neutral"
    )


@dataclass(frozen=True, kw_only=True)
class MeasureOptions(ModelOptions):
    """Options of a command that measures a model."""

    seed: Seed = option(0, "of all that is drawn")
    out: str | None = option(None, "folder of the results; null: one beside the export")


@dataclass(frozen=True, kw_only=True)
class SourceOptions(MeasureOptions):
    """Options of a command that measures a model on held-out texts."""

    source: str = option("stdlib", "'stdlib', a text folder, a benchmark's file or a Hub data set")
    subset: str | None = option(None, "one category of a benchmark, or a Hub data set's own name")
    split: str = option("heldout", "of the source; a benchmark has none, but GSM8K: 'test' is all")
    limit: Count | None = option(None, "documents of the source that are read; null: all")


@dataclass(frozen=True, kw_only=True)
class PromptOptions(SourceOptions):
    """Options of a command that measures a model on held-out prompts."""

    chat: bool | None = option(None, "ask in the chat template; null: where the model has one")
    prompts: Count | None = option(
        None, f"how many held-out ones; null: {PROMPTS}, or all of a file of yours that has fewer"
    )
    prompt_length: Tokens | None = option(None, "tokens; null: 64 of a text, all of a question")
    max_new_tokens: Tokens = option(128, "tokens of an answer, at the most")
    ignore_eos: bool = option(False, "go on after end-of-text, to max_new_tokens")

    @property
    def prompt_set(self) -> dict:
        """Return the arguments of `data.text.prompts.heldout_prompts`, without the tokenizer."""
        names = ("source", "split", "chat", "subset", "limit")
        given = {name: getattr(self, name) for name in names}
        given |= {"count": self.prompts or PROMPTS, "fewer": self.prompts is None}
        return given | {"length": self.prompt_length}
