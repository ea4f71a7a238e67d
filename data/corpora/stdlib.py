"""The lab corpus: the standard library's Python files, which every machine has."""

import hashlib
import sysconfig
import tokenize
from pathlib import Path

from data.files import is_hidden

# Character tables, tests and installed packages: not the source code that we want to model.
_SKIPPED = {
    "encodings", "test", "tests", "site-packages", "dist-packages", "idle_test", "__pycache__",
}  # fmt: skip


def is_held_out(id: str) -> bool:
    """Return True for about one id in forty, by a hash of the id: the same on every machine."""
    return int(hashlib.sha1(id.encode()).hexdigest(), 16) % 40 == 0


def check_split(split: str) -> None:
    """Raise ValueError unless `split` is 'train' or 'heldout'."""
    if split not in ("train", "heldout"):
        raise ValueError(f"Unknown split {split!r}. Choose from 'train', 'heldout'.")


def stdlib_documents(split: str) -> list[dict[str, str]]:
    """Return the standard library's files, `{"id": relative POSIX path, "text": source code}`."""
    check_split(split)
    root = Path(sysconfig.get_path("stdlib"))
    paths = source_files(root)
    if not paths:
        raise ValueError(
            f"source='stdlib' found no .py files in {root}: this Python was installed without "
            "sources. Use another Python, or give a folder of text files as the source."
        )
    documents = []
    for id, file in paths.items():
        if is_held_out(id) == (split == "heldout"):
            with tokenize.open(file) as opened:  # it honours PEP 263's coding lines
                documents.append({"id": id, "text": opened.read()})
    return documents


def source_files(root: Path) -> dict[str, Path]:
    """Return a folder's .py files by POSIX path, without tests, hidden and nested installations."""
    paths = {file.relative_to(root).as_posix(): file for file in root.rglob("*.py")}
    return {
        id: paths[id]
        for id in sorted(paths)
        if _SKIPPED.isdisjoint(id.split("/")) and not any(map(is_hidden, id.split("/")))
    }
