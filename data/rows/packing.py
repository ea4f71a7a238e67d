"""Document-aware packing: many documents in rows of equal length, and the format on disk.

A packed row has four columns of `length` integers, and any further columns of its documents:

    input_ids  token ids, the pad id after the last document
    document   index of the document inside the row: 0, 1, 2, ...; -1 for padding
    position   position inside the document; 0 again where a row cuts a document in two,
               because attention does not cross rows
    trained    1 where the token is a training target, else 0
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch.utils.data import Dataset

from data.files import delete, hidden_sibling, put_in_place, read_array, read_json

COLUMNS = ("input_ids", "document", "position", "trained")
_DTYPE = "<i4"

Columns = Mapping[str, np.ndarray]
Encoded = tuple[list[int], list[bool], *tuple[Any, ...]]  # and columns, where there are any


def pack(documents: Iterable[Encoded], length: int, pad_id: int) -> Iterator[dict[str, Any]]:
    """Yield packed rows of exactly `length` tokens, filled greedily with documents in their order.

    A document that does not fit continues in the next row as a new chunk. A chunk has at least two
    tokens, since a single token predicts nothing: a last free position is padded, and a single
    remaining token (or a one-token document) is dropped.

    Args:
        documents: `(token ids, training mask)` each, and optionally further values of each token,
            `{name: [n, ...]}`, with the same names for every document.
        length: Tokens per row, at least 2.
        pad_id: Token id of padding.

    Yields:
        Rows, as `{column: list of length integers}`; further columns are arrays [length, ...].

    >>> [row["input_ids"] for row in pack([([5, 6, 7], [True] * 3)] * 2, 4, pad_id=0)]
    [[5, 6, 7, 0], [5, 6, 7, 0]]
    """
    if length < 2:
        raise ValueError(f"length={length} is too short to pack rows. Choose at least 2.")
    row = _empty_row()
    for ids, trained, *more in documents:
        start = 0
        while len(ids) - start >= 2:
            free = length - len(row["input_ids"])
            if free < 2:
                yield _padded(row, length, pad_id)
                row = _empty_row()
                continue
            stop = min(start + free, len(ids))
            document = row["document"][-1] + 1 if row["document"] else 0
            row["input_ids"] += ids[start:stop]
            row["document"] += [document] * (stop - start)
            row["position"] += range(stop - start)
            row["trained"] += map(int, trained[start:stop])
            for name, values in (more[0] if more else {}).items():
                row.setdefault(name, []).append(values[start:stop])
            start = stop
    if row["input_ids"]:
        yield _padded(row, length, pad_id)


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

    @classmethod
    def build(
        cls,
        folder: str | os.PathLike,
        documents: Iterable[Encoded],
        length: int,
        pad_id: int,
        fingerprint: dict,
    ) -> "PackedRows":
        """Return the packed rows of `documents`, written atomically to `folder` or reused from it.

        Rows are reused, and `documents` not read, if `length`, `pad_id` and `fingerprint` are
        equal. `fingerprint` holds the rows' inputs (source, tokenizer, options) as JSON;
        `documents` is as in `pack`.
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
            counts = _write(temporary, documents, length, pad_id)
            (temporary / "manifest.json").write_text(json.dumps({**key, **counts}, indent=2))
            # Another process may have built the same rows meanwhile, and may be reading them.
            if _read_manifest(folder) != _read_manifest(temporary):
                put_in_place(temporary, folder)
        finally:
            delete(temporary)
        return cls(folder)

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
        return read_json(folder / "manifest.json", ("rows", "tokens", "length", "columns"))
    except (FileNotFoundError, NotADirectoryError):
        return None


def _write(folder: Path, documents: Iterable[Encoded], length: int, pad_id: int) -> dict:
    """Write packed rows into `folder` as they arrive, and return the counts for the manifest."""
    rows, tokens, trained, files, kinds = 0, 0, 0, dict[str, BinaryIO](), dict[str, tuple]()
    try:
        for row in pack(documents, length, pad_id):
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
            # The first token of a chunk has none before it that could predict it.
            trained += sum(t for t, position in zip(row["trained"], row["position"]) if position)
        for column, file in files.items():
            file.seek(0)
            _write_header(file, rows, *kinds[column])
    finally:
        for file in files.values():
            file.close()
    if not rows:
        raise ValueError(
            "no row to train on: no document has 2 tokens or more. Check the source and its split."
        )
    if not trained:
        raise ValueError(
            f"no token to train on: the source's {tokens} tokens in {rows} rows have no answer, or "
            "only empty ones. Check the source: trained are texts, and the assistant's turns"
        )
    more = [column for column in kinds if column not in COLUMNS]
    return {"rows": rows, "tokens": tokens, "columns": more}


def _write_header(file, rows: int, dtype: np.dtype, shape: tuple[int, ...]) -> None:
    # numpy pads the header, so it can be rewritten in place with the final number of rows.
    descr = np.lib.format.dtype_to_descr(dtype)
    np.lib.format.write_array_header_1_0(
        file, {"descr": descr, "fortran_order": False, "shape": (rows, *shape)}
    )
