"""The command line of every command: `key=value`, `--help`, `--cfg job`, one line for a mistake.

The grammar of values is `decoding.commands.values`; options are fields of a dataclass
(`decoding.commands.options`) or keys of a recipe (`decoding.commands.recipes`).
"""

import errno
import inspect
import logging
import os
import re
import shlex
import sys
import textwrap
import typing
from collections.abc import Callable, Iterable
from dataclasses import MISSING, Field, fields
from typing import Any, NamedTuple

import transformers

from decoding.commands.options import check
from decoding.commands.values import convert, show, split, type_name, unknown

WIDTH, COLUMN = 100, 46  # of --help: characters of a line, and where descriptions begin


def main(run: Callable[[list[str]], None]) -> None:
    """Run a command with sys.argv; a user's mistake ends it with one line and status 2.

    Args:
        run: The command. Its ValueError or OSError is a user's mistake, which PARADE_TRACEBACK=1
            shows in full.
    """
    try:
        run(sys.argv[1:])
    except (ValueError, OSError) as error:
        if os.environ.get("PARADE_TRACEBACK"):
            raise
        print(f"error: {one_line(error)}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(130)


def typed(command: str) -> str:
    """This process's command as a user types it.

    Args:
        command: The module that runs.
    """
    return f"python -m {command} {shlex.join(sys.argv[1:])}".strip()


def quiet() -> None:
    """Hide loading bars and advice of transformers, which would mix with a command's own lines."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    # transformers imports it where it is installed, and it announces that there is no GPU.
    logging.getLogger("DeepSpeed").addFilter(lambda r: "accelerator to CPU" not in r.getMessage())


def one_line(error: Exception) -> str:
    """The text of an error on one line, as a user should read it."""
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"the disk is full ({error.filename or 'while writing'}): free some space, run again"
    return " ".join(str(error).split())


def asked(argv: list[str]) -> tuple[str, list[str]]:
    """What a command line asks for.

    Args:
        argv: The arguments.

    Returns:
        'help', 'config' or 'run', and the arguments `key=value`.

    Raises:
        ValueError: There is no such flag.
    """
    wish, pairs, words = "run" if argv else "help", [], iter(argv)
    for word in words:
        flag, _, value = word.partition("=")
        if word in ("-h", "--help", "help"):
            wish = "help"
        elif flag in ("-c", "--cfg"):
            value = value or next(words, "")
            if value != "job":
                raise unknown(f"value of {flag}", value, ["job"])
            wish = "config" if wish == "run" else wish
        elif word.startswith("-"):
            raise unknown("flag", word, ["--help", "--cfg job"])
        else:
            pairs.append(word)
    return wish, pairs


def parse(argv: list[str], into: type, command: str):
    """The options of a command, from its arguments.

    `--help` and `--cfg job` print and exit with status 0.

    Args:
        argv: Arguments `key=value`.
        into: A dataclass of options. It may have an EXAMPLE, the arguments of one call.
        command: The module that runs, for `--help` and errors.

    Returns:
        An `into`, each value of its field's type.

    Raises:
        ValueError: A key is unknown or missing, or a value is of a wrong type or not allowed.
    """
    wish, pairs = asked(argv)
    known = {f.name: f for f in fields(into)}
    hints = typing.get_type_hints(into)
    if wish == "help":
        lines = [
            Line(f.name, _default(f), hints[f.name], text, f.metadata.get("choices", ()))
            for f, text in _described(into)
        ]
        print(help_page(command, inspect.getdoc(into), lines, getattr(into, "EXAMPLE", "")))
        sys.exit(0)
    values = {}
    for argument in pairs:
        key, text = split(argument)
        if key not in known:
            raise unknown("key", key, known)
        f = known[key]
        verbatim = f.metadata.get("verbatim", False)
        values[key] = text if verbatim else convert(key, text, hints[key], _default(f))
        check(key, values[key], **f.metadata)
    given = {name: values.get(name, _default(f)) for name, f in known.items()}
    if wish == "config":
        print_config({name: "???" if x is MISSING else x for name, x in given.items()})
        sys.exit(0)
    for name, value in given.items():
        if value is MISSING:
            about = known[name].metadata.get("help", "")
            raise ValueError(
                f"{name}= is missing{about and f' ({about})'}: python -m {command} {name}=..."
            )
    return into(**values)


class Line(NamedTuple):
    """An option in `--help`; its default is MISSING where it must be given."""

    key: str
    default: Any
    type: Any
    help: str = ""
    choices: tuple[str, ...] = ()


def help_page(command: str, about: str, options: Iterable[Line], example: str = "") -> str:
    """The text that `--help` prints.

    Args:
        command: The module that runs.
        about: What the command does.
        options: All options.
        example: The arguments of one call.
    """
    page = [f"usage: python -m {command} key=value ...", "", about, ""]
    page += ["options, each with its default and type:", *map(help_line, options), ""]
    page += [
        "  --help     print this",
        "  --cfg job  print the composed configuration, run nothing",
    ]
    if example:
        page += ["", "example:", f"  python -m {command} {example}"]
    return "\n".join(page)


def help_line(o: Line) -> str:
    """The lines of an option: default and type, and its description beside or below them."""
    named = f"{o.key}=..." if o.default is MISSING else f"{o.key}={show(o.default)}"
    kind = " | ".join(o.choices) if o.choices else type_name(o.type)
    if o.choices and type_name(o.type).startswith("list"):
        kind = f"list of {kind}"
    left = f"  {named}  ({kind}{', needed' if o.default is MISSING else ''})"
    words = textwrap.wrap(o.help, WIDTH - COLUMN, break_on_hyphens=False)
    if words and len(left) < COLUMN - 1:
        left = f"{left:<{COLUMN}}{words.pop(0)}"
    return "\n".join([left, *(" " * COLUMN + line for line in words)])


def print_config(config: dict) -> None:
    """Print a configuration as YAML."""
    import yaml  # transformers brings it

    plain = {k: list(v) if isinstance(v, tuple) else v for k, v in config.items()}
    print(yaml.safe_dump(plain, sort_keys=False, allow_unicode=True), end="")


def _default(f: Field) -> Any:
    return f.default_factory() if f.default_factory is not MISSING else f.default


def _described(into: type) -> list[tuple[Field, str]]:
    """The fields with their descriptions, those that must be given first.

    A field of a class that other packages share (`SamplingParams`) is described in its docstring, a
    paragraph `name: text` each.
    """
    described = {}
    for owner in reversed(into.__mro__):
        for name, text in re.findall(
            r"^ *(\w+): (.+(?:\n {4,}(?!\w+: ).+)*)", inspect.getdoc(owner) or "", re.MULTILINE
        ):
            described[name] = " ".join(text.split())
    found = [(f, f.metadata.get("help") or described.get(f.name, "")) for f in fields(into)]
    return sorted(found, key=lambda pair: _default(pair[0]) is not MISSING)
