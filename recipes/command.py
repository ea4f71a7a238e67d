"""The command line of every command: flags, `--help`, and one line for a user's mistake."""

import errno
import gc
import logging
import os
import shlex
import sys
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import MISSING
from typing import Any, NamedTuple

from recipes.values import show, type_name, unknown

# Bars of the Hub's client, for a terminal: those of bytes on the way.
TRANSFERS = ("huggingface_hub.http_get", "huggingface_hub.xet_get")
WIDTH, COLUMN = 100, 46  # of --help: characters of a line, and where descriptions begin
FLAGS = "  --help     print this\n  --cfg job  print the composed configuration, run nothing"


def main(run: Callable[[list[str]], None]) -> None:
    """Run a command with sys.argv; a user's mistake ends it with one line and status 2.

    A ValueError or OSError is a user's mistake; PARADE_TRACEBACK=1 shows it in full.
    """
    quiet()
    call(run)


def call(run: Callable[[list[str]], object]) -> None:
    """Call a function with sys.argv; a user's mistake ends the process as in `main`."""
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
    finally:
        gc.freeze()  # the interpreter would search a million objects for cycles before it ends


def typed(command: str) -> str:
    """Return this process's command as a user types it; `command` is its module."""
    return f"python -m {command} {shlex.join(sys.argv[1:])}".strip()


def quiet() -> None:
    """Hide loading bars and advice of transformers, which would mix with a command's own lines."""
    import huggingface_hub.utils
    import transformers
    from huggingface_hub.constants import HF_HUB_DISABLE_PROGRESS_BARS

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    # That has disabled the Hub's too; these come back unless the user does not want them.
    for bar in TRANSFERS if not HF_HUB_DISABLE_PROGRESS_BARS else ():
        huggingface_hub.utils.enable_progress_bars(bar)
    # transformers imports it where it is installed, and it announces that there is no GPU.
    logging.getLogger("DeepSpeed").addFilter(lambda r: "accelerator to CPU" not in r.getMessage())


def one_line(error: Exception) -> str:
    """Return an error's text on one line, for a user to read."""
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"the disk is full ({error.filename or 'while writing'}): free some space, run again"
    return " ".join(str(error).split())


def asked(argv: list[str]) -> tuple[str, list[str]]:
    """Return a command line's request ('help', 'config' or 'run') and its `key=value`s."""
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


class Line(NamedTuple):
    """An option in `--help`; its default is MISSING if it is required."""

    key: str
    default: Any
    type: Any
    help: str = ""


def help_page(command: str, about: str, options: Iterable[Line], example: str = "") -> str:
    """Return the text that `--help` prints; `example` is the arguments of one call."""
    page = [f"usage: python -m {command} key=value ...", "", about, ""]
    page += ["options, each with its default and type:", *map(help_line, options), "", FLAGS]
    if example:
        page += ["", "example:", f"  python -m {command} {example}"]
    return "\n".join(page)


def help_line(o: Line) -> str:
    """Return an option's lines: default and type, and its description."""
    missing = o.default is MISSING
    needed = ", needed" if missing else ""
    left = f"  {o.key}={'...' if missing else show(o.default)}  ({type_name(o.type)}{needed})"
    words = textwrap.wrap(o.help, WIDTH - COLUMN, break_on_hyphens=False)
    if words and len(left) < COLUMN - 1:
        left = f"{left:<{COLUMN}}{words.pop(0)}"
    return "\n".join([left, *(" " * COLUMN + line for line in words)])
