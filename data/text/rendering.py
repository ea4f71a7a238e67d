"""Chat templates, rendered in a process of its own, which is killed if it takes too long.

A template is a program of whoever made the model. Jinja's sandbox keeps it from files, but not from
running for ever or from filling the memory: `{{ 'a' * 10**12 }}` is one step. So this file is also
that process's program. It does not import torch, and stays for the next chat.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import datetime
from types import SimpleNamespace

SECONDS = 10  # for a chat
MEMORY = 2**29  # bytes, more than the process has before its first chat
CHARACTERS = 2**24  # of a rendered chat

Spans = list[tuple[int, int]]
_idle: list[subprocess.Popen] = []
_date: ContextVar[str | None] = ContextVar("date", default=None)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_idle.clear)  # their pipes are the parent's


def render(template: str, messages: list[dict], **options) -> tuple[str, Spans]:
    """Return a chat as a template renders it, and the spans of its `{% generation %}` blocks.

    Args:
        template: The chat template.
        messages: Turns `{"role": ..., "content": ...}`, of JSON's types.
        options: Special tokens, and options of transformers' `render_jinja_template`.

    Raises:
        ValueError: In one line, if the template refuses the chat, fails, or has no end.
    """
    options |= {"chat_template": template, "conversations": [messages], "seconds": SECONDS}
    options |= {"rendered_on": _date.get()}
    try:
        asked = json.dumps(options, default=str).encode() + b"\n"
    except RecursionError:
        raise ValueError("its messages are nested too deeply") from None
    try:
        worker = _idle.pop()  # one thread's at a time
    except IndexError:
        worker = _start()
    if worker.poll() is not None:
        worker = _start()
    assert worker.stdin is not None
    assert worker.stdout is not None
    reply = b""
    try:
        with suppress(BrokenPipeError):
            worker.stdin.write(asked)
            worker.stdin.flush()
        reply = worker.stdout.readline()
    finally:
        if reply.endswith(b"\n"):
            _idle.append(worker)
        else:  # also after Ctrl-C
            worker.kill()
            worker.communicate()
    if not reply.endswith(b"\n"):
        raise ValueError(f"it takes more than {SECONDS} seconds, or too much memory")
    found = json.loads(reply)
    if "error" in found:
        raise ValueError(found["error"])
    return found["text"], [(start, stop) for start, stop in found["spans"]]


@contextmanager
def dated(date: str | None) -> Iterator[None]:
    """Render, in the context, with an ISO date as today's; None: the clock's."""
    before = _date.set(date)
    try:
        yield
    finally:
        _date.reset(before)


def prepare() -> None:
    """Start the process that renders, which takes a second or two, without waiting for it."""
    if not _idle:
        _idle.append(_start())


def _start() -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-P", __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for the command that has started it
    )


def _serve() -> None:
    """Render what comes on standard input, a line of JSON a chat, until its end."""
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # seconds, for nothing
    from jinja2 import TemplateError
    from transformers.utils import chat_template_utils as utils

    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    with suppress(ImportError, OSError, ValueError):  # where there is /proc, as on Linux
        import resource

        with open("/proc/self/statm") as file:
            most = int(file.read().split()[0]) * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    for line in sys.stdin.buffer:
        given = json.loads(line)
        signal.alarm(given.pop("seconds"))  # it ends the process, whatever that is doing
        day = given.pop("rendered_on")
        today = datetime.fromisoformat(day) if day else datetime.now()
        utils.datetime = SimpleNamespace(now=lambda today=today: today)  # of strftime_now
        try:
            [text], spans = utils.render_jinja_template(**given)
            if len(text) > CHARACTERS:
                raise ValueError(f"it writes more than {CHARACTERS} characters")
            reply = json.dumps({"text": text, "spans": spans[0] if spans else []}).encode()
        except Exception as error:
            said = " ".join(str(error).split())[:300]
            kind = "" if isinstance(error, TemplateError) and said else type(error).__name__
            reply = json.dumps({"error": ": ".join(filter(None, (kind, said)))}).encode()
        signal.alarm(0)
        replies.write(reply + b"\n")
        replies.flush()


if __name__ == "__main__":
    _serve()
