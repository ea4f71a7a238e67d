"""The grammar of every command, `key=value`, and one clear line for a user's mistake."""

import ast
import difflib
import errno
import logging
import os
import shlex
import sys
import types
import typing
from collections.abc import Callable, Iterable
from dataclasses import MISSING, fields

import transformers


def main(run: Callable[[list[str]], None]) -> None:
    """Run a command with sys.argv; a user's mistake ends it with one line and status 2."""
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
    """This process's command as a user types it. command: the module that runs."""
    return f"python -m {command} {shlex.join(sys.argv[1:])}".strip()


def quiet() -> None:
    """No loading bars and advice of transformers between a command's own lines."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    # transformers imports it where it is installed, and it announces that there is no GPU.
    logging.getLogger("DeepSpeed").addFilter(lambda r: "accelerator to CPU" not in r.getMessage())


def one_line(error: Exception) -> str:
    """An error as a user should read it."""
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"the disk is full ({error.filename or 'while writing'}): free some space, run again"
    return " ".join(str(error).split())


def split(argument: str) -> tuple[str, str]:
    """'key=value' -> (key, value)."""
    key, equals, value = argument.partition("=")
    if not equals or not key:
        raise ValueError(f"{argument!r} is not of the form key=value")
    return key, value


def unknown(kind: str, given: str, known: Iterable[str]) -> ValueError:
    """The error for a name that does not exist; it names the nearest one that does."""
    known = sorted(known)
    near = difflib.get_close_matches(given, known, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return ValueError(f"unknown {kind} {given!r}.{hint} Choose from {known}")


def parse(argv: list[str], into: type, command: str):
    """Arguments `key=value` -> the dataclass `into`, each value of its field's type."""
    known = {f.name: f for f in fields(into)}
    if not argv or argv[0] in ("-h", "--help", "help"):
        keys = "\n".join(f"  {_usage(f)}" for f in known.values())
        print(f"python -m {command} key=value ...\n\n{into.__doc__}\n\nkeys:\n{keys}")
        sys.exit(0)
    values = {}
    hints = typing.get_type_hints(into)
    for argument in argv:
        key, value = split(argument)
        if key not in known:
            raise unknown("key", key, known)
        values[key] = convert(key, value, hints[key])
    for name, f in known.items():
        if f.default is MISSING and f.default_factory is MISSING and name not in values:
            raise ValueError(f"{name}= is missing: python -m {command} {name}=...")
    return into(**values)


def _usage(f) -> str:
    if f.default is MISSING and f.default_factory is MISSING:
        return f"{f.name}  (needed)"
    return f"{f.name}={f.default if f.default is not MISSING else f.default_factory()}"


def convert(key: str, text: str, hint):
    """A value of the type `hint`: str, int, float, bool, tuple[x, ...] or an optional one."""
    if isinstance(hint, types.UnionType):
        if text.lower() in ("null", "none"):
            return None
        return convert(key, text, next(t for t in typing.get_args(hint) if t is not types.NoneType))
    if typing.get_origin(hint) is tuple:
        item = typing.get_args(hint)[0]
        return tuple(convert(key, str(x), item) for x in _items(text))
    try:
        if hint is bool:
            return {"true": True, "false": False}[text.lower()]
        return hint(text)
    except (KeyError, ValueError):
        raise ValueError(f"{key}={text!r} is not of type {hint.__name__}") from None


def _items(text: str) -> list:
    """'[1,2]', "['a','b']" or a single item."""
    if not text.startswith("["):
        return [text]
    try:
        return list(ast.literal_eval(text))
    except (ValueError, SyntaxError):
        return [item.strip() for item in text.strip("[]").split(",") if item.strip()]
