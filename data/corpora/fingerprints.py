"""Fingerprints of inputs: short hashes of content, which are the keys of caches and provenance."""

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from huggingface_hub.constants import HF_HOME, HF_HUB_CACHE
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import HFValidationError, validate_repo_id

from data.files import atomic_write
from terminal.progress import Work

VERSION = "v2-"  # how fingerprints of whole files begin; before, big files were read in samples
BLOCKS, BLOCK = 16, 4096  # of those samples, their number and size in bytes
REMEMBERED = 2**26  # bytes of an input whose fingerprint is kept until its files change
SETTLED = 2_000_000_000  # nanoseconds after which a file system tells two changes apart


def input_fingerprint(path: str | Path) -> str:
    """Return the fingerprint of a file or folder: of every byte, and of the names in a folder.

    A model is its config.json, weights and code, a collection its manifest and shards, another
    folder all of its files.
    """
    return files_fingerprint(_files(Path(path)))


def model_fingerprint(name: str) -> str:
    """Return the fingerprint of a model's folder or file, the commit of a Hub id, or else its name.

    The commit is that of the local cache; a model that is not there yet has only its name.
    """
    return input_fingerprint(name) if Path(name).exists() else commit(name) or name


def same_model(name: str, stored: object) -> bool:
    """Return whether a stored fingerprint is that of a model, also one of before `VERSION`."""
    if stored == model_fingerprint(name) or str(stored).startswith(VERSION):
        return stored == model_fingerprint(name)
    return stored == (_digest(_files(Path(name)), sampled=True) if Path(name).exists() else name)


def weights_fingerprint(files: Iterable[Path]) -> str:
    """Return the fingerprint of files of weights: of the name, type and a block of each tensor.

    Nothing else is read, so that it costs milliseconds. It is that of a copy with other files, and
    any training of a tensor changes it. Of files that are no safetensors samples are read.
    """
    parts = list[tuple[str, str]]()
    for file in files:
        if file.suffix != ".safetensors":
            parts.append((file.name, _digest([(file.name, file)], sampled=True)))
            continue
        with file.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(size))
            header.pop("__metadata__", None)
            for name, tensor in header.items():
                begin, end = tensor["data_offsets"]
                middle = max(begin, (begin + end - BLOCK) // 2)
                stream.seek(8 + size + middle)
                block = hashlib.sha256(stream.read(min(BLOCK, end - middle))).hexdigest()
                parts.append((name, f"{tensor['dtype']} {tensor['shape']} {block}"))
    return hashlib.sha256(json.dumps(sorted(parts)).encode()).hexdigest()[:16]


def files_fingerprint(files: Iterable[tuple[str, Path]]) -> str:
    """Return the fingerprint of files `(name, path)`: of their names and of every byte.

    That of a big input is remembered in Hugging Face's cache, by the size, the inode and the times
    of every file. The time of an inode's last change is the system's own: a copy, an edit or a
    restored date cannot leave it as it was.
    """
    files, now = [*files], time.time_ns()
    states = [(name, file.stat()) for name, file in files]
    key = [[n, s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino, s.st_dev] for n, s in states]
    name = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]
    known = Path(HF_HOME) / "parade" / "fingerprints" / name
    size = sum(state.st_size for _, state in states)
    big = size > REMEMBERED and os.name == "posix"
    if big and known.is_file():
        return known.read_text()
    with Work("fingerprint of an input", size, "B") as work:
        found = VERSION + _digest(files, read=work.advance)
    if big and all(now - state.st_ctime_ns > SETTLED for _, state in states):
        with suppress(OSError):
            known.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(known) as temporary:
                temporary.write_text(found)
    return found


def commit(name: str) -> str | None:
    """Return the commit of a Hub model's or data set's main branch in the local cache, if any."""
    try:
        validate_repo_id(name)
    except HFValidationError:  # a sentence, a command
        return None
    for kind in ("model", "dataset"):
        folder = repo_folder_name(repo_id=name, repo_type=kind)
        reference = Path(HF_HUB_CACHE, folder, "refs", "main")
        if reference.is_file():
            return reference.read_text().strip()
    return None


def _files(path: Path) -> list[tuple[str, Path]]:
    """Return the files of an input, with their names in it, sorted."""
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    if (path / "config.json").is_file():
        kinds = (".safetensors", ".bin", ".py")
        files = [f for f in files if f.parent == path]
        files = [f for f in files if f.name == "config.json" or f.suffix in kinds]
    elif (path / "manifest.json").is_file():  # a collection, which may contain folders of others
        files = [f for f in files if f.parent in (path, path / "shards")]
    return [(str(file.relative_to(path)), file) for file in files]


def _digest(
    files: Iterable[tuple[str, Path]],
    sampled: bool = False,
    read: Callable[[int], None] = lambda size: None,
) -> str:
    digest = hashlib.sha256()
    for name, file in files:
        size = file.stat().st_size
        digest.update(f"{name} {size}\n".encode())
        with file.open("rb") as stream:
            if not sampled or size <= BLOCKS * BLOCK:
                while block := stream.read(2**20):
                    digest.update(block)
                    read(len(block))
                continue
            for i in range(BLOCKS):
                stream.seek(i * (size - BLOCK) // (BLOCKS - 1))
                digest.update(stream.read(BLOCK))
    return digest.hexdigest()[:16]
