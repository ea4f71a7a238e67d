"""What of a text may leave this machine: no absolute path, name of user or host, no token.

A model card and the settings beside it name folders, and a command line may hold a token. They are
written as `public` returns them; a run's own folder keeps them whole.
"""

import getpass
import os
import re
import socket
from pathlib import Path
from typing import Any

from huggingface_hub import get_token

NAMES = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|API_?KEY|ACCESS_KEY", re.IGNORECASE)
TOKENS = re.compile(r"\b(hf_[A-Za-z0-9]{16,}|gh[pousr]_\w{20,}|sk-[\w-]{20,}|AKIA[A-Z0-9]{16})\b")
LOGIN = re.compile(r"(?<=://)[^/\s@]+@")  # of an address
# Of an address that is no public one: a bare name, a number, or whatever has a port.
HOST = re.compile(r"(?<=://)([\w-]+|[\d.]+|[\w.-]+(?=:\d))(?=[:/\s]|$)")
FILE = re.compile(r"\bfile://(?=/)")
# From the root, and no part of an address or of a relative path.
ABSOLUTE = re.compile(r"(?<![\w.~/:*-])/(?!/)[^\s'\"`,;:|)\]}]*[^\s'\"`,;:|)\]}.]")
SHORTEST = 8  # characters of a secret: shorter values of the environment are words and numbers


def public(value: Any) -> Any:
    """A text, or every text of lists and nodes, as it may leave this machine.

    Args:
        value: A text, a list, a dict with its keys, or anything else, which stays.

    Returns:
        The same with paths below the working directory made relative, those below the home
        directory begun with ~, .../NAME of all others, and `[secret]` for what is a token.
    """
    if isinstance(value, dict):
        return {public(k): public(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [*map(public, value)]
    if not isinstance(value, str):
        return value
    for secret in _secrets():
        value = value.replace(secret, "[secret]")
    value = FILE.sub("", HOST.sub("host", LOGIN.sub("", TOKENS.sub("[secret]", value))))
    value = re.sub(re.escape(f"{Path.cwd()}") + r"(/|(?![\w.-]))", "", value)
    home = str(Path.home())
    if len(Path(home).parts) > 1:  # a machine's / is nobody's
        value = re.sub(re.escape(home) + r"(?![\w.-])", "~", value)
    value = ABSOLUTE.sub(lambda found: f".../{Path(found[0]).name}", value)
    names = ((_user(), "user", "(?<=/)"), (socket.gethostname(), "host", r"(?<![\w./-])"))
    for name, instead, before in names:
        if name:
            value = re.sub(rf"{before}{re.escape(name)}(?![\w.-])", instead, value)
    return value


def _user() -> str:
    """The name of this process's user; '' for one without a name, as in some containers."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return ""


def _secrets() -> list[str]:
    """The tokens and passwords that this process knows, the longest first."""
    found = {value for name, value in os.environ.items() if NAMES.search(name)}
    found.add(get_token() or "")
    return sorted((s for s in found if len(s) >= SHORTEST), key=len, reverse=True)
