"""Document sources: the standard library, local files, saved data sets, the Hugging Face Hub."""

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path

from data.corpora.conditions import Condition, conditions, keeps
from data.corpora.docstrings import docstring_documents, function_documents
from data.corpora.stdlib import check_split, is_held_out, stdlib_documents

# Corpora of the installed Python, by the name of their source.
INSTALLED = {
    "stdlib": stdlib_documents,
    "docstrings": docstring_documents,
    "functions": function_documents,
}
TEXT_SUFFIXES = (".txt", ".py", ".md")

_CHAT_COLUMNS = ("messages", "conversations")
_PAIR_COLUMNS = (
    ("prompt", "answer"),
    ("prompt", "response"),
    ("prompt", "completion"),
    ("question", "answer"),
    ("problem", "solution"),
    ("instruction", "response"),
    ("instruction", "output"),
    ("input", "output"),
)
_ID_COLUMNS = ("id", "task_id", "question_id", "prompt_id")
# ShareGPT's role names, as the roles of chat templates.
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bard": "assistant"}


def load_documents(
    source: str,
    split: str = "train",
    *,
    field: str = "text",
    streaming: bool = False,
    limit: int | None = None,
    subset: str | None = None,
    where: str | None = None,
) -> Iterable[dict]:
    """The documents of a source, read lazily. A document is a dict of one of three shapes:

        {"id", "text": str}
        {"id", "messages": [{"role": str, "content": str}, ...]}
        {"id", "prompt": str, "answer": str}

    Args:
        source: `stdlib`; `docstrings` (the functions of the standard library and of installed
            packages that have one, as prompt-answer pairs); `functions` (the same, every second
            one asked for by its head, to be completed); a file or folder of .txt, .py, .md
            (one document a file), .jsonl or .parquet; a folder written by
            `Dataset.save_to_disk`; else a Hub data set id.
        split: `train` or `heldout`, separated by a hash of the document's id. For a Hub data set
            any split that it has; `heldout` is taken out of its `train` by the same hash.
        field: the text column. If not `text`, this column is read even from rows that also look
            like chats or prompt-answer pairs.
        streaming: read a Hub data set without downloading it first.
        limit: maximum number of documents.
        subset: the configuration of a Hub data set.
        where: read only the rows that meet these conditions on their columns, such as
            'average_test_score>=1' (`data.corpora.conditions`); `limit` counts those.

    Returns:
        An iterable over the documents. The first one has been read, so most errors are raised
        here and not during iteration.

    Raises:
        ValueError: for a missing path, an unknown split, a missing column, an invalid line, a
            condition on rows without columns, or a source without documents.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit={limit} is not allowed: give at least 1, or leave it out")
    asked = conditions(where)
    documents = islice(_documents(source, split, field, streaming, subset, asked), limit)
    first = next(documents, None)
    if first is None:
        raise ValueError(
            f"source={source!r} has no document in split={split!r}"
            f"{'' if where is None else f' with where={where!r}'}. "
            "Of a local corpus about one document in forty is held out: give a larger corpus or "
            "another split."
        )
    return chain([first], documents)


def _documents(
    source: str,
    split: str,
    field: str,
    streaming: bool,
    subset: str | None,
    asked: list[Condition],
) -> Iterator[dict]:
    if source in INSTALLED:
        _check_columns(source, asked)
        return iter(INSTALLED[source](split))
    path = Path(source).expanduser()
    if path.exists():
        check_split(split)
        return _of_split(_local_documents(path, field, asked), split)
    if _looks_like_a_path(source):
        raise ValueError(
            f"source={source!r} does not exist (looked in {Path.cwd()}). "
            f"Give one of {', '.join(map(repr, INSTALLED))}, a local file or folder, or a Hub data "
            "set id such as 'org/name'."
        )
    rows = _hub_rows(source, "train" if split == "heldout" else split, streaming, subset)
    documents = _table_documents(rows, field, source, asked)
    # Any other split is used whole: no documents were held out of it.
    return _of_split(documents, split) if split in ("train", "heldout") else documents


def _check_columns(source: str, asked: list[Condition]) -> None:
    if asked:
        raise ValueError(
            f"source={source!r} has texts without columns, so where= has nothing to compare: "
            "leave it out"
        )


def _of_split(documents: Iterable[dict], split: str) -> Iterator[dict]:
    held_out = split == "heldout"
    return (document for document in documents if is_held_out(document["id"]) == held_out)


def _looks_like_a_path(source: str) -> bool:
    return (
        source.startswith((".", "/", "~"))
        or source.count("/") > 1
        or Path(source).suffix in (*TEXT_SUFFIXES, ".jsonl", ".parquet")
    )


def _local_documents(path: Path, field: str, asked: list[Condition]) -> Iterator[dict]:
    if (path / "dataset_info.json").exists() or (path / "dataset_dict.json").exists():
        return _table_documents(_saved_rows(path), field, str(path), asked)
    for suffix, read in ((".parquet", _parquet_documents), (".jsonl", _jsonl_documents)):
        if files := _files(path, (suffix,)):
            return read(files, field, asked)
    if files := _files(path, TEXT_SUFFIXES):
        _check_columns(str(path), asked)
        return _text_documents(files)
    raise ValueError(
        f"source={str(path)!r} has no readable files. "
        f"Allowed: {', '.join(TEXT_SUFFIXES)}, .jsonl and .parquet files, "
        "or a folder written by Dataset.save_to_disk."
    )


def _files(path: Path, suffixes: tuple[str, ...]) -> dict[str, Path]:
    """The files with these suffixes, by POSIX path relative to the folder (or by file name)."""
    if path.is_file():
        return {path.name: path} if path.suffix in suffixes else {}
    found = {
        file.relative_to(path).as_posix(): file
        for file in path.rglob("*")
        if file.suffix in suffixes and file.is_file()
    }
    return dict(sorted(found.items()))


def _text_documents(files: dict[str, Path]) -> Iterator[dict]:
    for id, file in files.items():
        try:
            yield {"id": id, "text": file.read_text(encoding="utf-8")}
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{file} is not UTF-8 text (byte {error.start}). Convert it."
            ) from None


def _jsonl_documents(files: dict[str, Path], field: str, asked: list[Condition]) -> Iterator[dict]:
    for name, file in files.items():
        for line, row in read_jsonl(file):
            here = f"{file}, line {line}"
            if keeps(row, asked, here):
                yield to_document(row, field, f"{name}:{line}", here)


def read_jsonl(file: Path) -> Iterator[tuple[int, dict]]:
    """The rows of a .jsonl or .jsonl.gz file; blank lines are skipped.

    Yields:
        Line number (from 1) and row.

    Raises:
        ValueError: naming file and line, for a line that is not one JSON object in UTF-8, and
            naming the file if it cannot be unpacked.
    """
    with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as lines:
        for number, line in enumerate(_unpacked(lines, file), start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode())
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{file}, line {number} is not UTF-8 text (byte {error.start}). Convert it, "
                    "or, if it is packed, unpack it first."
                ) from None
            except json.JSONDecodeError as error:
                raise ValueError(f"{file}, line {number} is not valid JSON: {error.msg}.") from None
            if not isinstance(row, dict):
                raise ValueError(
                    f"{file}, line {number} is not a JSON object but {type(row).__name__}."
                )
            yield number, row


def _unpacked(lines: Iterable[bytes], file: Path) -> Iterator[bytes]:
    try:
        yield from lines
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{file} is not a whole gzip file: {error}") from None


def _parquet_documents(
    files: dict[str, Path], field: str, asked: list[Condition]
) -> Iterator[dict]:
    for name, file in files.items():
        yield from _table_documents(read_parquet(file), field, name, asked)


def read_parquet(file: Path) -> Iterator[dict]:
    """The rows of a .parquet file, by column.

    Raises:
        ValueError: naming the file, if it cannot be read.
    """
    datasets = _datasets()
    try:
        # Streaming reads the file in place; otherwise datasets copies it to its cache.
        yield from datasets.load_dataset(
            "parquet", data_files=str(file), split="train", streaming=True
        )
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{file} is not a whole parquet file: {reason}") from None


def _saved_rows(path: Path) -> Iterable[dict]:
    saved = _datasets().load_from_disk(str(path))
    if not isinstance(saved, dict):
        return saved
    if "train" not in saved:
        raise ValueError(
            f"{path} has no 'train' split but {sorted(saved)}. Give the folder of a split: "
            f"{path / sorted(saved)[0]}."
        )
    return saved["train"]


def _hub_rows(source: str, split: str, streaming: bool, subset: str | None) -> Iterable[dict]:
    datasets = _datasets()
    try:
        return datasets.load_dataset(source, name=subset, split=split, streaming=streaming)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        # The error of datasets lists the allowed splits and configurations over several lines.
        reason = " ".join(str(error).split())
        raise ValueError(
            f"source={source!r} is not a local path and none of {', '.join(INSTALLED)}, and "
            f"loading it from the Hub failed (split={split!r}, subset={subset!r}): {reason}"
        ) from error


def _datasets():
    try:
        import datasets
    except ImportError:
        raise ValueError(
            "This source needs the datasets library. Run: pip install 'parade[train]'"
        ) from None
    return datasets


def _table_documents(
    rows: Iterable[dict], field: str, name: str, asked: list[Condition]
) -> Iterator[dict]:
    for index, row in enumerate(rows):
        here = f"{name}, row {index}"
        if keeps(row, asked, here):
            yield to_document(row, field, f"{name}:{index}", here)


def to_document(row: dict, field: str, default_id: str, where: str) -> dict:
    """A document in one of the shapes of `load_documents`, made from a row of a table.

    Args:
        row: columns by name.
        field: the text column.
        default_id: the id of a row without an id column.
        where: name of the row in error messages.

    Raises:
        ValueError: naming the row's columns, if none of them can be used.
    """
    id = row_id(row, default_id)
    if field == "text":
        for column in _CHAT_COLUMNS:
            if row.get(column):
                return {"id": id, "messages": [_message(turn, where) for turn in row[column]]}
        if isinstance(turns := row.get("data"), list):
            return {"id": id, "messages": _alternating(turns, where)}
        for prompt, answer in _PAIR_COLUMNS:
            if isinstance(row.get(prompt), str) and isinstance(row.get(answer), str):
                return {"id": id, "prompt": _with_input(row, prompt), "answer": row[answer]}
    if not isinstance(row.get(field), str):
        raise ValueError(
            f"{where}: no text in column {field!r}. It has {sorted(row)}. Allowed: {field!r}, "
            "or name another with field=, or chats in 'messages' or 'conversations', or two "
            "columns such as 'prompt' and 'answer'."
        )
    return {"id": id, "text": row[field]}


def row_id(row: dict, default: str) -> str:
    """The id of a row: the first id column that it has, else `default`."""
    return next(
        (str(row[column]) for column in _ID_COLUMNS if row.get(column) is not None), default
    )


def _with_input(row: dict, prompt: str) -> str:
    """The prompt of a row, with Alpaca's column `input` appended to its instruction."""
    if prompt == "instruction" and row.get("input"):
        return f"{row['instruction']}\n\n{row['input']}"
    return row[prompt]


def _alternating(turns: list[str], where: str) -> list[dict[str, str]]:
    """The messages of UltraChat's raw `data`: texts of alternating roles, the user first."""
    roles = ("user", "assistant")
    return [
        _message({"role": roles[index % 2], "content": turn}, where)
        for index, turn in enumerate(turns)
    ]


def _message(turn: dict, where: str) -> dict[str, str]:
    if isinstance(turn, dict):
        role, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
        if isinstance(role, str) and isinstance(content, str):
            return {"role": _ROLES.get(role, role), "content": content}
    raise ValueError(
        f"{where}: a chat turn needs text in 'role' and 'content', or in 'from' and 'value', "
        f"but is {str(turn)[:80]!r}."
    )
