"""Files: atomic writes (whole, as before, or not at all), and reads whose errors name the file.

What is written atomically is written under a hidden name beside its own path and renamed when it is
complete. Several processes may write the same path at once: each has a hidden name of its own, and
the last rename counts. A process that is killed leaves at most `.<name>.<random>` beside the path.
"""

import errno
import json
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

LARGEST_TEXT = 2**28  # characters; a device has no end


def read_text(file: Path) -> str:
    """The content of a text file.

    Raises:
        ValueError: It is not UTF-8, or longer than `LARGEST_TEXT`; the line names it.
        OSError: It cannot be read.
    """
    try:
        with file.open(encoding="utf-8") as stream:
            text = stream.read(LARGEST_TEXT + 1)
        if len(text) > LARGEST_TEXT:
            raise ValueError(f"{file} is no text to be read whole: over {LARGEST_TEXT} characters")
        return text
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is damaged: no UTF-8 text (byte {error.start})") from None


def read_json(file: Path, needed: Iterable[str] = ()) -> dict:
    """The object that a JSON file holds.

    Args:
        file: The file.
        needed: Keys that it has.

    Raises:
        ValueError: It holds no object, or one without these keys; the line names the file.
        OSError: It cannot be read.
    """
    try:
        found = json.loads(read_text(file))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{file} is damaged: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{file} is damaged: it holds no object but {shortened(found)}")
    for key in needed:
        if key not in found:
            raise ValueError(f"{file} is damaged: it has no {key!r}")
    return found


def read_array(file: Path, mmap: bool = True) -> np.ndarray:
    """The array that a .npy file holds.

    Args:
        file: The file.
        mmap: Whether its numbers stay on the disk until they are read.

    Raises:
        ValueError: It is missing or damaged; the line names it.
    """
    try:
        return np.load(file, mmap_mode="r" if mmap else None, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(
            f"{file} is damaged ({' '.join(str(error).split())}): remove {file.parent}, and it is "
            "made again"
        ) from None


def shortened(value: Any) -> str:
    """A JSON value as an error shows it."""
    try:
        text = json.dumps(value)
    except RecursionError:
        text = type(value).__name__
    return text if len(text) <= 60 else f"{text[:57]}..."


@contextmanager
def atomic_write(path: str | os.PathLike, sync: bool = False) -> Iterator[Path]:
    """A context that replaces a file by what its block has written, at the block's end.

    Where the block raises, `path` is untouched and nothing is left.

    Args:
        path: The file; its folder must exist.
        sync: Whether to wait until the bytes are on the disk, so that they outlive a crash of the
            machine too.

    Yields:
        A temporary path for the block to write.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp(), "a.txt")
    >>> with atomic_write(file) as temporary:
    ...     _ = temporary.write_text("whole")
    >>> [p.name for p in file.parent.iterdir()]
    ['a.txt']
    """
    temporary = hidden_sibling(Path(path))
    try:
        yield temporary
        put_in_place(temporary, Path(path), sync)
    finally:
        delete(temporary)


@contextmanager
def atomic_folder(path: str | os.PathLike) -> Iterator[Path]:
    """A context that replaces a folder by what its block has written, at the block's end.

    Where the block raises, `path` is untouched and nothing is left. A folder that was at `path`
    is set aside for the moment of the rename and then removed.

    Args:
        path: The folder; those above it are made.

    Yields:
        A new empty folder for the block to fill.
    """
    temporary = hidden_sibling(Path(path))
    temporary.mkdir(parents=True)
    try:
        yield temporary
        put_in_place(temporary, Path(path))
    finally:
        delete(temporary)


def check_space(folder: Path, needed: int) -> None:
    """Print what is about to be written and what is free, and check that it is enough.

    Args:
        folder: Where it will be.
        needed: Bytes, at the most.

    Raises:
        ValueError: The disk has less.
    """
    there = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    free = shutil.disk_usage(there).free
    print(f"at most {needed / 1e6:.1f} MB to write, {free / 1e9:.1f} GB free")
    if needed > free:
        raise ValueError(
            f"{folder} needs up to {needed / 1e6:.0f} MB, but only {free / 1e6:.0f} MB are free"
        )


def hidden_sibling(path: Path) -> Path:
    """A new hidden name beside a path, so that a rename stays on one file system."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}")


def put_in_place(temporary: Path, path: Path, sync: bool = False) -> None:
    """Rename a complete file or folder to its own path, over what is there.

    Args:
        temporary: The complete file or folder, on the same file system.
        path: Its path from now on.
        sync: Whether to wait until all of it is on the disk, and then until the rename is.

    Raises:
        OSError: The rename failed; what was at `path` is there again.
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
    """Whether two values of a key are the same: equal, or spellings of one path that exists.

    Args:
        a: A value as JSON has them: also lists and dictionaries, whose values may be such paths.
        b: Another.

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
        return Path(a).samefile(b)
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
