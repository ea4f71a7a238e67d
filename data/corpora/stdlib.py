"""The lab corpus: the Python source of the running interpreter's standard library.

It is on every machine that runs parade, needs no network and is never shipped with parade.
"""

import hashlib
import sysconfig
import tokenize
from pathlib import Path
from typing import Literal

Split = Literal["train", "heldout"]

# Tables of characters, tests and other people's packages are not the library's own prose.
_SKIPPED = {
    "encodings",
    "test",
    "tests",
    "site-packages",
    "dist-packages",
    "idle_test",
    "__pycache__",
}


def is_held_out(id: str) -> bool:
    """True for about one id in forty. Depends on the id alone: the same on every machine."""
    return int(hashlib.sha1(id.encode()).hexdigest(), 16) % 40 == 0


def check_split(split: str) -> None:
    """Raise ValueError unless `split` is one that every local corpus has."""
    if split not in ("train", "heldout"):
        raise ValueError(f"Unknown split {split!r}. Choose from 'train', 'heldout'.")


def stdlib_documents(split: Split) -> list[dict[str, str]]:
    """The standard library's files as `{"id": relative posix path, "text": source}`, by path.

    Raises ValueError for an unknown split, and where the interpreter has no sources on disk.
    """
    check_split(split)
    root = Path(sysconfig.get_path("stdlib"))
    paths = {file.relative_to(root).as_posix(): file for file in root.rglob("*.py")}
    paths = {id: file for id, file in paths.items() if _SKIPPED.isdisjoint(id.split("/"))}
    if not paths:
        raise ValueError(
            f"source='stdlib' found no .py files in {root}: this Python was installed without "
            "sources. Use another Python, or give a folder of text files as the source."
        )
    held_out = split == "heldout"
    return [
        {"id": id, "text": _read(paths[id])} for id in sorted(paths) if is_held_out(id) == held_out
    ]


def _read(file: Path) -> str:
    # tokenize.open honours PEP 263 coding lines, which a few files have.
    with tokenize.open(file) as opened:
        return opened.read()
