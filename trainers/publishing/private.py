"""Texts made public: without absolute paths, names of user or host, and tokens.

Model cards and settings name folders, and a command line may hold a token. Exports have them as
`public` returns them; a run's own folder keeps them whole.
"""

import getpass
import os
import re
import socket
from pathlib import Path
from typing import Any

from huggingface_hub import get_token
from omegaconf import OmegaConf

from recipes.stored import read_config

NAMES = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|API_?KEY|ACCESS_KEY", re.IGNORECASE)
TOKENS = re.compile(r"\b(hf_[A-Za-z0-9]{16,}|gh[pousr]_\w{20,}|sk-[\w-]{20,}|AKIA[A-Z0-9]{16})\b")
LOGIN = re.compile(r"(?<=://)[^/\s@]+@")  # the login in an address
# The host of an address that is not public: a bare name, a number, or a host with a port.
HOST = re.compile(r"(?<=://)([\w-]+|[\d.]+|[\w.-]+(?=:\d))(?=[:/\s]|$)")
FILE_URL = re.compile(r"\bfile://(?=/)")
# A path from the root that is not part of an address or of a relative path.
ABSOLUTE = re.compile(r"(?<![\w.~/:*-])/(?!/)[^\s'\"`,;:|)\]}]*[^\s'\"`,;:|)\]}.]")
SHORTEST = 8  # characters of a secret: shorter values of the environment are words and numbers


def public(value: Any) -> Any:
    """Return a text, or every text of lists and dicts, without what is private.

    Paths below the working directory become relative, those below the home directory begin with ~,
    others are .../NAME, and tokens are `[secret]`.
    """
    return _public(value, _secrets())


def _public(value: Any, secrets: list[str]) -> Any:
    if isinstance(value, dict):
        return {_public(k, secrets): _public(v, secrets) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_public(v, secrets) for v in value]
    if not isinstance(value, str):
        return value
    for secret in secrets:
        value = value.replace(secret, "[secret]")
    value = FILE_URL.sub("", HOST.sub("host", LOGIN.sub("", TOKENS.sub("[secret]", value))))
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


def private_part(text: str, paths: bool = True) -> str | None:
    """Return a secret or a path of this machine in a text that would be made public; None if none.

    Without `paths` only the working directory counts as a path: words of a vocabulary or of code
    may be absolute paths, too.
    """
    if any(secret in text for secret in _secrets()) or TOKENS.search(text):
        return "a token or password"
    if len(Path.cwd().parts) > 2 and str(Path.cwd()) in text:
        return str(Path.cwd())
    found = (match[0] for match in ABSOLUTE.finditer(text) if paths)
    return next((path for path in found if len(Path(path).parts) > 2 and _exists(path)), None)


def _exists(path: str) -> bool:
    try:
        return Path(path).exists()
    except OSError:  # too long a name, or a folder of another user
        return False


def read_public(config: Path) -> dict:
    """Return the settings in a run's config.yaml, without what is private."""
    return public(OmegaConf.to_container(read_config(config)))


def _user() -> str:
    """Return the name of this process's user; '' for none, as in some containers."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return ""


def _secrets() -> list[str]:
    """Return the tokens and passwords that this process knows, the longest first."""
    found = {value for name, value in os.environ.items() if NAMES.search(name)}
    found.add(get_token() or "")
    return sorted((s for s in found if len(s) >= SHORTEST), key=len, reverse=True)
