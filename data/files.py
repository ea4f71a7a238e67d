"""Files: atomic writes (whole or not at all), and reads whose errors name the file.

An atomic write uses a hidden temporary name in the same folder and renames at the end. Several
processes may write the same path at once: the last rename counts. A killed process leaves at most
`.<name>.<random>` in the folder.
"""

import errno
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from safetensors import SafetensorError

from terminal.progress import is_first

LARGEST_TEXT = 2**28  # characters; a device has no end
CACHES = {"__pycache__", "__MACOSX", "node_modules"}
MARKS = {"CACHEDIR.TAG", "pyvenv.cfg"}  # files that make a folder a cache, or an environment
DEEPEST = 100  # lists and objects within each other in a JSON text


def read_text(file: Path) -> str:
    """Return the content of a UTF-8 text file of at most `LARGEST_TEXT` characters."""
    try:
        with file.open(encoding="utf-8-sig") as stream:  # without the mark that editors put first
            text = stream.read(LARGEST_TEXT + 1)
        if len(text) > LARGEST_TEXT:
            raise ValueError(f"{file} is no text to be read whole: over {LARGEST_TEXT} characters")
        return text
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is damaged: no UTF-8 text (byte {error.start})") from None


def read_json(file: Path, needed: Iterable[str] = ()) -> dict:
    """Return the object in a JSON file, which must have all `needed` keys."""
    try:
        found = parse_json(read_text(file))
    except ValueError as error:
        raise ValueError(f"{file} is damaged: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{file} is damaged: it holds no object but {shortened(found)}")
    for key in needed:
        if key not in found:
            raise ValueError(f"{file} is damaged: it has no {key!r}")
    return found


def parse_json(text: str) -> Any:
    """Return the value of a JSON text; ValueError for any that cannot be worked with.

    That is also one deeper than `DEEPEST`, which overflows the stack where it is printed or stored,
    and one with half a surrogate pair, which no UTF-8 file and no tokenizer takes.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(f"it is nested deeper than {DEEPEST}") from None
    except json.JSONDecodeError:
        raise
    except ValueError as error:  # Python's advice on its limit of digits follows
        raise ValueError(str(error).partition(";")[0]) from None
    # Only texts with so many brackets, or with such an escape, can be either.
    if text.count("[") + text.count("{") > DEEPEST and _deep(value):
        raise ValueError(f"it is nested deeper than {DEEPEST}")
    if re.search(r"\\u[dD][89a-fA-F]", text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = error.object[error.start]
            raise ValueError(f"it has half a surrogate pair, {half!a}, which is no text") from None
    return value


def _deep(value: Any) -> bool:
    """Return whether a JSON value is nested deeper than `DEEPEST`."""
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(DEEPEST):
        inside = [v.values() if isinstance(v, dict) else v for v in level]
        level = [x for values in inside for x in values if isinstance(x, (dict, list))]
        if not level:
            return False
    return True


def is_hidden(name: str) -> bool:
    """Return whether a file or folder with this name is hidden, or a cache."""
    return name.startswith((".", "~$")) or name in CACHES


def files_below(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return a folder's files in two lists, both sorted: those that were meant, and the others.

    Others are hidden files, and all files of hidden folders, caches and environments below it.
    """
    meant, others, aside = list[Path](), list[Path](), set[Path]()
    for root, _, names in os.walk(folder):
        here = Path(root)
        if here != folder and (
            here.parent in aside or is_hidden(here.name) or not MARKS.isdisjoint(names)
        ):
            aside.add(here)
        for name in names:
            (others if here in aside or is_hidden(name) else meant).append(here / name)
    return sorted(meant), sorted(others)


def refuse_links(folder: Path, paths: Iterable[Path], hub_cache: bool = False) -> None:
    """Check that paths below a folder are reached without a link, so that they are its own files.

    A link in a stranger's folder may lead to any file of this machine. With `hub_cache`, those of
    huggingface_hub's cache are allowed: from `snapshots/COMMIT/` into `blobs/` of one repository.
    """
    home = folder.resolve()
    blobs = home.parents[1] / "blobs" if hub_cache and home.parent.name == "snapshots" else None
    for path in paths:
        found = Path(os.path.realpath(path))
        ours = found == home / path.relative_to(folder) or found.parent == blobs
        if not ours or found.is_symlink():  # which leads to itself
            raise ValueError(
                f"{path} is a link, or lies in one, and leads to {found}: links are not followed, "
                "as they may lead to private files. Put the file itself there"
            )


def read_array(file: Path, mmap: bool = True) -> np.ndarray:
    """Return the array in a .npy file; with `mmap` its numbers are read when they are used."""
    try:
        return np.load(file, mmap_mode="r" if mmap else None, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(
            f"{file} is damaged ({' '.join(str(error).split())}): remove {file.parent}, and it is "
            "made again"
        ) from None


def package(name: str, what: str, install: str) -> ModuleType:
    """Return an optional package, which `what` needs; ValueError says what pip installs it by."""
    try:
        return import_module(name)
    except ImportError:
        raise ValueError(f"{what} needs the package {name}. Run: pip install {install}") from None


def shortened(value: Any) -> str:
    """Return a JSON value, shortened for an error message."""
    try:
        text = json.dumps(value)
    except RecursionError:
        text = type(value).__name__
    return text if len(text) <= 60 else f"{text[:57]}..."


@contextmanager
def atomic_write(path: str | os.PathLike, sync: bool = False) -> Iterator[Path]:
    """Replace a file, at the end of the block, by what the block wrote to the temporary path.

    If the block raises, `path` is untouched. With `sync` the bytes reach the disk before the
    rename, so they survive a crash of the machine.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp(), "a.txt")
    >>> with atomic_write(file) as temporary:
    ...     _ = temporary.write_text("whole")
    >>> [p.name for p in file.parent.iterdir()]
    ['a.txt']
    """
    temporary = hidden_sibling(Path(path))
    try:
        with named(path):
            yield temporary
            put_in_place(temporary, Path(path), sync)
    finally:
        delete(temporary)


@contextmanager
def atomic_folder(path: str | os.PathLike) -> Iterator[Path]:
    """Replace a folder, at the end of the block, by the new folder that the block has filled.

    If the block raises, `path` is untouched. A folder that was at `path` is set aside and then
    removed.
    """
    temporary = hidden_sibling(Path(path))
    temporary.mkdir(parents=True)
    try:
        with named(path):
            yield temporary
            put_in_place(temporary, Path(path))
    finally:
        delete(temporary)


@contextmanager
def named(path: str | os.PathLike) -> Iterator[None]:
    """Let an error of the context's writes, such as a full disk, name this path if it names none.

    That of safetensors, which is no OSError, becomes one.
    """
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise
    except SafetensorError as error:
        if (found := re.search(r"os error (\d+)", str(error))) is None:
            raise
        number = int(found[1])
        raise OSError(number, os.strerror(number), str(path)) from error


def check_space(folder: Path, needed: int) -> None:
    """Check that the disk of `folder` has `needed` bytes free, and print both numbers."""
    there = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    free = shutil.disk_usage(there).free
    if is_first():
        print(f"at most {needed / 1e6:.1f} MB to write, {free / 1e9:.1f} GB free")
    if needed > free:
        raise ValueError(
            f"{folder} needs up to {needed / 1e6:.0f} MB, but only {free / 1e6:.0f} MB are free"
        )


def hidden_sibling(path: Path) -> Path:
    """Return a new hidden name next to a path, so that a rename stays on one file system."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}")


def put_in_place(temporary: Path, path: Path, sync: bool = False) -> None:
    """Rename a complete file or folder to `path`, and restore what was there if that fails.

    With `sync`, wait until its contents and the rename are on the disk.
    """
    if sync:
        for part in (temporary, *(temporary.rglob("*") if temporary.is_dir() else ())):
            _sync(part)
    aside = hidden_sibling(path)
    try:
        while True:
            try:
                os.replace(temporary, path)
                break
            except OSError as error:  # a rename does not replace a folder that holds something
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
            _set_aside(path, aside)
    except BaseException:
        if aside.exists() and not path.exists():
            os.replace(aside, path)
        raise
    finally:
        delete(aside)
    if sync:
        _sync(path.parent)


def same_setting(a: Any, b: Any) -> bool:
    """Return whether two JSON values are equal, or are paths to the same existing file.

    >>> same_setting({"teacher": "."}, {"teacher": "../" + Path.cwd().name})
    True
    >>> same_setting("no/such", "./no/such"), same_setting(1, 2)
    (False, False)
    """
    if a == b:
        return True
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same_setting(a[k], b[k]) for k in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same_setting, a, b))
    if not (isinstance(a, str) and isinstance(b, str)):
        return False
    try:
        return Path(os.path.expanduser(a)).samefile(os.path.expanduser(b))
    except (OSError, ValueError):  # none is there, or such a name cannot be
        return False


def delete(path: Path) -> None:
    """Remove a file or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _set_aside(path: Path, aside: Path) -> None:
    delete(aside)
    try:
        os.replace(path, aside)
    except FileNotFoundError:  # another process has just done the same
        return


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
