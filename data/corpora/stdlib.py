"""The lab corpus: the Python source files of the running interpreter's standard library.

Every machine that runs parade has it, so it needs no network and is not distributed with parade.
"""

import hashlib
import sysconfig
import tokenize
from pathlib import Path
from typing import Literal

Split = Literal["train", "heldout"]

# Character tables, tests and installed packages: not the source code that we want to model.
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
    """True for about one id in forty: a hash of the id alone, so the same on every machine."""
    return int(hashlib.sha1(id.encode()).hexdigest(), 16) % 40 == 0


def check_split(split: str) -> None:
    """Check the name of a split.

    Raises:
        ValueError: unless `split` is 'train' or 'heldout'.
    """
    if split not in ("train", "heldout"):
        raise ValueError(f"Unknown split {split!r}. Choose from 'train', 'heldout'.")


def stdlib_documents(split: Split) -> list[dict[str, str]]:
    """The files of the standard library, sorted by path.

    Returns:
        Documents `{"id": relative POSIX path, "text": source code}`.

    Raises:
        ValueError: for an unknown split, or an interpreter without source files on disk.
    """
    check_split(split)
    root = Path(sysconfig.get_path("stdlib"))
    paths = source_files(root)
    if not paths:
        raise ValueError(
            f"source='stdlib' found no .py files in {root}: this Python was installed without "
            "sources. Use another Python, or give a folder of text files as the source."
        )
    held_out = split == "heldout"
    return [
        {"id": id, "text": _read(file)} for id, file in paths.items() if is_held_out(id) == held_out
    ]


def source_files(root: Path) -> dict[str, Path]:
    """The .py files below a folder, without tests and nested installations.

    Returns:
        Files by their POSIX path relative to `root`, sorted by it.
    """
    paths = {file.relative_to(root).as_posix(): file for file in root.rglob("*.py")}
    return {id: paths[id] for id in sorted(paths) if _SKIPPED.isdisjoint(id.split("/"))}


def _read(file: Path) -> str:
    # tokenize.open honours PEP 263 coding lines, which a few files have.
    with tokenize.open(file) as opened:
        return opened.read()
