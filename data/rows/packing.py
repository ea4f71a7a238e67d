"""Document-aware packing: many documents in rows of equal length, and the format on disk.

A packed row has four columns of `length` integers, and any further columns of its documents:

    input_ids  token ids, the pad id after the last document
    document   index of the document inside the row: 0, 1, 2, ...; -1 for padding
    position   position inside the document; 0 again where a row cuts a running text in two,
               because attention does not cross rows
    trained    1 where the token is a training target, else 0
"""

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch.utils.data import Dataset

from data.files import delete, hidden_sibling, put_in_place, read_array, read_json, shortened
from terminal.progress import track

COLUMNS = ("input_ids", "document", "position", "trained")
COUNTS = ("answers", "cut_answers", "long_prompts", "cut_tokens", "untrained")
_NUMBERS = ("rows", "tokens", "length", "largest_id")
_DTYPE = "<i4"

Encoded = tuple[list[int], list[bool], *tuple[Any, ...]]  # and columns, where there are any
OPEN = 64  # rows that wait for an answer that fits: more take memory and hardly save padding


def pack(
    documents: Iterable[Encoded], length: int, pad_id: int, counts: Counter | None = None
) -> Iterator[dict[str, Any]]:
    """Yield packed rows of exactly `length` tokens.

    An answer, a document of which not every token is trained, stays whole: a token that follows a
    cut would be trained without its prompt. It goes into the open row that it fills best, and one
    longer than a row loses its end. An answer without a token to predict in its row is left out.

    Running text fills rows of its own, in its order. What does not fit continues in the next row as
    a new chunk. A chunk has at least two tokens, since a single token predicts nothing, so one may
    end a token early; only a one-token document, or the last token of an odd number in rows of two,
    is dropped.

    Args:
        documents: `(token ids, training mask)` each, and optionally further values of each token,
            `{name: [n, ...]}`, with the same names for every document.
        length: Tokens per row, at least 2.
        pad_id: Token id of padding.
        counts: Counts, by `COUNTS`, all answers, those that lost their end, those left out because
            the prompt fills the row, the trained tokens that both lost, and documents left out
            because no token of theirs is trained.

    Yields:
        Rows, as `{column: list of length integers}`; further columns are arrays [length, ...].

    >>> [row["input_ids"] for row in pack([([5, 6, 7], [True] * 3)] * 2, 4, pad_id=0)]
    [[5, 6, 7, 0], [5, 6, 7, 0]]
    >>> answers = [([5, 6, 7], [False, True, True]), ([1, 2, 3, 4], [False] * 2 + [True] * 2)]
    >>> [row["input_ids"] for row in pack(answers, 6, pad_id=0)]
    [[5, 6, 7, 0, 0, 0], [1, 2, 3, 4, 0, 0]]
    """
    if length < 2:
        raise ValueError(f"length={length} is too short to pack rows. Choose at least 2.")
    counts = Counter() if counts is None else counts
    text, answers = _empty_row(), list[dict[str, list]]()
    for document in documents:
        ids, trained = document[:2]
        if all(trained):
            yield from _fill(text, document, length, pad_id)
            continue
        counts["answers"] += 1
        lost, kept = sum(trained[length:]), any(trained[1:length])
        counts["cut_tokens"] += lost
        counts["cut_answers"] += kept and len(ids) > length
        if not kept:
            counts["long_prompts" if lost else "untrained"] += 1
            continue
        free = [length - len(row["input_ids"]) for row in answers]
        fits = [i for i, left in enumerate(free) if left >= len(ids)]
        if not fits:
            if len(answers) == OPEN:
                yield _padded(answers.pop(free.index(min(free))), length, pad_id)
            answers.append(_empty_row())
        best = min(fits, key=free.__getitem__) if fits else -1
        _append(answers[best], document, 0, min(len(ids), length))
        if length - len(answers[best]["input_ids"]) < 2:
            yield _padded(answers.pop(best), length, pad_id)
    for row in (text, *answers):
        if row["input_ids"]:
            yield _padded(row, length, pad_id)


def _fill(
    row: dict[str, list], document: Encoded, length: int, pad_id: int
) -> Iterator[dict[str, Any]]:
    """Add a running text to a row; yield, and empty, the row each time that it is full."""
    start, end = 0, len(document[0])
    while end - start >= 2:
        free = length - len(row["input_ids"])
        stop = min(start + free, end)
        if end - stop == 1 and length > 2:
            stop -= 1  # two tokens for the next row
        if stop - start < 2:
            yield _padded(row, length, pad_id)
            row.clear()
            row |= _empty_row()
            continue
        _append(row, document, start, stop)
        start = stop


def _append(row: dict[str, list], document: Encoded, start: int, stop: int) -> None:
    """Add the tokens of a document from `start` to `stop` to a row, as a chunk."""
    ids, trained, *more = document
    number = row["document"][-1] + 1 if row["document"] else 0
    row["input_ids"] += ids[start:stop]
    row["document"] += [number] * (stop - start)
    row["position"] += range(stop - start)
    row["trained"] += map(int, trained[start:stop])
    for name, values in (more[0] if more else {}).items():
        row.setdefault(name, []).append(values[start:stop])


def _empty_row() -> dict[str, list]:
    return {column: [] for column in COLUMNS}


def _padded(row: dict[str, list], length: int, pad_id: int) -> dict[str, Any]:
    padding = {"input_ids": pad_id, "document": -1, "position": 0, "trained": 0}
    missing = length - len(row["input_ids"])
    padded: dict[str, Any] = {c: row[c] + [padding[c]] * missing for c in COLUMNS}
    for name in row.keys() - padding.keys():
        values = np.concatenate(row[name])
        padded[name] = np.pad(values, [(0, missing)] + [(0, 0)] * (values.ndim - 1))
    return padded


class PackedRows(Dataset):
    """Packed rows on disk, memory-mapped: a folder with one .npy file per column, made by `build`.

    `rows[i]` is a dict of tensors [length], int64 for integers, one per column; those of further
    columns may be [length, ...].
    """

    def __init__(self, folder: str | os.PathLike) -> None:
        self.folder = Path(folder)
        manifest = _read_manifest(self.folder)
        if manifest is None:
            raise ValueError(
                f"{self.folder} holds no packed rows. "
                "Build them first with PackedRows.build(folder, documents, ...)."
            )
        self.manifest = manifest
        self._columns = {
            column: read_array(self.folder / f"{column}.npy")
            for column in [*COLUMNS, *self.manifest["columns"]]
        }
        self._check()

    def _check(self) -> None:
        """Check that the columns are those of the manifest, which others may have changed."""
        shape = (self.manifest["rows"], self.manifest["length"])
        for column, array in self._columns.items():
            whole = column not in COLUMNS or (array.ndim == 2 and array.dtype == _DTYPE)
            if array.shape[:2] != shape or not whole:
                raise ValueError(
                    f"{self.folder} is damaged: its manifest.json has {shape[0]} rows of {shape[1]}"
                    f" tokens, and {column}.npy holds {array.dtype} of shape {array.shape}: remove "
                    "the folder, and it is made again"
                )

    @classmethod
    def build(
        cls,
        folder: str | os.PathLike,
        documents: Iterable[Encoded],
        length: int,
        pad_id: int,
        fingerprint: dict,
        total: int | None = None,
    ) -> "PackedRows":
        """Return the packed rows of `documents`, written atomically to `folder` or reused from it.

        Rows are reused, and `documents` not read, if `length`, `pad_id` and `fingerprint` are
        equal. `fingerprint` holds the rows' inputs (source, tokenizer, options) as JSON;
        `documents` is as in `pack`; `total` is their number, where it is known.
        """
        folder = Path(folder)
        key = json.loads(
            json.dumps({"length": length, "pad_id": pad_id, "fingerprint": fingerprint})
        )
        found = _read_manifest(folder)
        if found is not None and key.items() <= found.items():
            return cls(folder)
        if found is None and folder.exists() and any(folder.iterdir()):
            raise ValueError(f"{folder} is not empty and holds no packed rows. Give a new folder.")
        temporary = hidden_sibling(folder)
        temporary.mkdir(parents=True)
        try:
            followed = track(documents, "packing", total, "documents")
            manifest = {**key, **_write(temporary, followed, length, pad_id)}
            (temporary / "manifest.json").write_text(json.dumps(manifest, indent=2))
            if line := _said(manifest):
                print(line)
            # Another process may have built the same rows meanwhile, and may be reading them.
            if _read_manifest(folder) != _read_manifest(temporary):
                put_in_place(temporary, folder)
        finally:
            delete(temporary)
        return cls(folder)

    @property
    def largest_id(self) -> int:
        """The largest token id of the rows, which a network must know."""
        return self.manifest["largest_id"]

    @property
    def fingerprint(self) -> str:
        """The fingerprint of all that the rows were made from."""
        return self.folder.name

    def __len__(self) -> int:
        return self.manifest["rows"]

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = {column: array[index] for column, array in self._columns.items()}
        whole = {column: np.issubdtype(x.dtype, np.integer) for column, x in row.items()}
        return {
            c: torch.from_numpy(x.astype(np.int64 if whole[c] else x.dtype)) for c, x in row.items()
        }

    def __reduce__(self) -> tuple:
        # A spawned worker maps the files itself; pickling the maps would copy the whole corpus.
        return PackedRows, (self.folder,)


def _read_manifest(folder: Path) -> dict | None:
    try:
        manifest = read_json(folder / "manifest.json", (*_NUMBERS, "columns"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    names, numbers = manifest["columns"], {key: manifest[key] for key in _NUMBERS}
    if any(type(n) is not int or n < 0 for n in numbers.values()) or not (
        isinstance(names, list) and all(isinstance(name, str) for name in names)
    ):
        raise ValueError(
            f"{folder} is damaged: its manifest.json needs whole numbers as {', '.join(_NUMBERS)}, "
            f"and a list of names as columns, but has {shortened({**numbers, 'columns': names})}: "
            "remove the folder, and it is made again"
        )
    return manifest


def _write(folder: Path, documents: Iterable[Encoded], length: int, pad_id: int) -> dict:
    """Write packed rows into `folder` as they arrive, and return the counts for the manifest."""
    rows, tokens, largest, files, kinds = 0, 0, 0, dict[str, BinaryIO](), dict[str, tuple]()
    counts: Counter[str] = Counter(dict.fromkeys(COUNTS, 0))
    try:
        for row in pack(documents, length, pad_id, counts):
            arrays = {c: np.asarray(v, _DTYPE if c in COLUMNS else None) for c, v in row.items()}
            if not files:
                kinds = {column: (a.dtype, a.shape) for column, a in arrays.items()}
                files = {column: (folder / f"{column}.npy").open("wb") for column in arrays}
                for column, file in files.items():
                    _write_header(file, 0, *kinds[column])
            found = {column: (a.dtype, a.shape) for column, a in arrays.items()}
            assert found == kinds, f"documents have other columns than the first: {found}"
            for column, file in files.items():
                file.write(arrays[column].tobytes())
            rows += 1
            tokens += length - row["document"].count(-1)
            largest = max(largest, *row["input_ids"])
        for column, file in files.items():
            file.seek(0)
            _write_header(file, rows, *kinds[column])
    finally:
        for file in files.values():
            file.close()
    if not rows and counts["long_prompts"]:
        raise ValueError(
            f"no token to train on: the prompts of {counts['long_prompts']} answers fill rows of "
            f"{length} tokens, and {counts['untrained']} have no answer. Give longer rows (length=)"
        )
    if not rows and counts["untrained"]:
        raise ValueError(
            f"no token to train on: the source's {counts['untrained']} documents have no answer, "
            "or only empty ones. Check the source: trained are texts, and the assistant's turns"
        )
    if not rows:
        raise ValueError(
            "no row to train on: no document has 2 tokens or more. Check the source and its split."
        )
    more = [column for column in kinds if column not in COLUMNS]
    return {"rows": rows, "tokens": tokens, "largest_id": largest, **counts, "columns": more}


def _said(manifest: dict) -> str | None:
    """Return a line that says which answers are not whole in the rows; None if all are."""
    said = {
        "answers": "answers",
        "cut_answers": "lost their end",
        "long_prompts": "left out, as the prompt fills a row",
        "cut_tokens": "tokens of answers lost",
        "untrained": "left out, as nothing in them is trained",
    }
    counts = [f"{manifest[key]:,} {text}" for key, text in said.items() if manifest[key]]
    rows = f"{manifest['rows']:,} rows of {manifest['length']} tokens"
    return f"{rows}: {', '.join(counts)}" if len(counts) > 1 else None


def _write_header(file, rows: int, dtype: np.dtype, shape: tuple[int, ...]) -> None:
    # numpy pads the header, so it can be rewritten in place with the final number of rows.
    descr = np.lib.format.dtype_to_descr(dtype)
    np.lib.format.write_array_header_1_0(
        file, {"descr": descr, "fortran_order": False, "shape": (rows, *shape)}
    )
