"""Whether an input is still what it was: a short fingerprint of a model, a collection, a corpus."""

import hashlib
from pathlib import Path

BLOCKS, BLOCK = 16, 4096  # of a big file, what is read of it; bytes


def input_fingerprint(path: str | Path) -> str:
    """16 hex digits that tell whether an input is still what it was, in milliseconds.

    SHA-256 over the names, sizes and contents of a model's config.json, weights and code, of a
    collection's manifest and shards, of all files of any other folder, or of a single file. Of a
    file beyond 64 KiB 16 evenly spread blocks of 4 KiB stand for its content: weights trained anew
    differ, a change of a few bytes may pass.
    """
    path, digest = Path(path), hashlib.sha256()
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    if (path / "config.json").is_file():
        kinds = (".safetensors", ".bin", ".py")
        files = [f for f in files if f.parent == path]
        files = [f for f in files if f.name == "config.json" or f.suffix in kinds]
    elif (path / "manifest.json").is_file():  # a collection: others may have their folders in it
        files = [f for f in files if f.parent in (path, path / "shards")]
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.relative_to(path)} {size}\n".encode())
        with file.open("rb") as stream:
            if size <= BLOCKS * BLOCK:
                digest.update(stream.read())
                continue
            for i in range(BLOCKS):
                stream.seek(i * (size - BLOCK) // (BLOCKS - 1))
                digest.update(stream.read(BLOCK))
    return digest.hexdigest()[:16]
