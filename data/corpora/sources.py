"""Documents from anywhere: the standard library, local files, saved data sets, the Hub."""

import json
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path

from data.corpora.stdlib import check_split, is_held_out, stdlib_documents

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
# ShareGPT's names for the roles that chat templates know.
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bard": "assistant"}


def load_documents(
    source: str,
    split: str = "train",
    *,
    field: str = "text",
    streaming: bool = False,
    limit: int | None = None,
    subset: str | None = None,
) -> Iterable[dict]:
    """The documents of `source`, lazily, each a dict with `id` and one of three shapes.

        {"id", "text": str}
        {"id", "messages": [{"role": str, "content": str}, ...]}
        {"id", "prompt": str, "answer": str}

    Args:
        source: `stdlib`; a file or folder of .txt, .py, .md (one document a file), .jsonl or
            .parquet; a folder written by `Dataset.save_to_disk`; else a Hub data set id.
        split: `train` or `heldout`, told apart by a hash of the document's id. For a Hub data set
            any split that it has; `heldout` is cut from its `train` by the same hash.
        field: the text column. A name other than `text` is read even where the rows also look
            like chats or prompt and answer.
        streaming: do not download a Hub data set before reading it.
        limit: at most so many documents.
        subset: the configuration of a Hub data set.

    Raises ValueError for a missing path, an unknown split, a missing column, a broken line, and a
    source without documents; the first document is read at once, so most of these come early.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit={limit} leaves no document. Choose at least 1, or none at all.")
    documents = islice(_documents(source, split, field, streaming, subset), limit)
    first = next(documents, None)
    if first is None:
        raise ValueError(
            f"source={source!r} has no document in split={split!r}. "
            "Local corpora hold out about one document in forty: give a larger one or another "
            "split."
        )
    return chain([first], documents)


def _documents(
    source: str, split: str, field: str, streaming: bool, subset: str | None
) -> Iterator[dict]:
    if source == "stdlib":
        return iter(stdlib_documents(split))
    path = Path(source).expanduser()
    if path.exists():
        check_split(split)
        return _of_split(_local_documents(path, field), split)
    if _looks_like_a_path(source):
        raise ValueError(
            f"source={source!r} does not exist (looked in {Path.cwd()}). "
            "Give 'stdlib', a local file or folder, or a Hub data set id such as 'org/name'."
        )
    rows = _hub_rows(source, "train" if split == "heldout" else split, streaming, subset)
    documents = _table_documents(rows, field, source)
    # A named split is used whole, unless something was held out of it.
    return _of_split(documents, split) if split in ("train", "heldout") else documents


def _of_split(documents: Iterable[dict], split: str) -> Iterator[dict]:
    held_out = split == "heldout"
    return (document for document in documents if is_held_out(document["id"]) == held_out)


def _looks_like_a_path(source: str) -> bool:
    return (
        source.startswith((".", "/", "~"))
        or source.count("/") > 1
        or Path(source).suffix in (*TEXT_SUFFIXES, ".jsonl", ".parquet")
    )


def _local_documents(path: Path, field: str) -> Iterator[dict]:
    if (path / "dataset_info.json").exists() or (path / "dataset_dict.json").exists():
        return _table_documents(_saved_rows(path), field, str(path))
    for suffix, read in ((".parquet", _parquet_documents), (".jsonl", _jsonl_documents)):
        if files := _files(path, (suffix,)):
            return read(files, field)
    if files := _files(path, TEXT_SUFFIXES):
        return _text_documents(files)
    raise ValueError(
        f"source={str(path)!r} holds nothing that can be read. "
        f"Allowed: {', '.join(TEXT_SUFFIXES)}, .jsonl and .parquet files, "
        "or a folder written by Dataset.save_to_disk."
    )


def _files(path: Path, suffixes: tuple[str, ...]) -> dict[str, Path]:
    """The files with these suffixes by posix name: relative to the folder, or the file's own."""
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


def _jsonl_documents(files: dict[str, Path], field: str) -> Iterator[dict]:
    for name, file in files.items():
        for line, row in read_jsonl(file):
            yield to_document(row, field, f"{name}:{line}", f"{file}, line {line}")


def read_jsonl(file: Path) -> Iterator[tuple[int, dict]]:
    """`(line number, row)` of a .jsonl file, blank lines skipped.

    Raises ValueError with file and line where a line is not one JSON object.
    """
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{file}, line {number} is not valid JSON: {error.msg}.") from None
            if not isinstance(row, dict):
                raise ValueError(
                    f"{file}, line {number} is not a JSON object but {type(row).__name__}."
                )
            yield number, row


def _parquet_documents(files: dict[str, Path], field: str) -> Iterator[dict]:
    for name, file in files.items():
        # Streaming reads the file where it lies; otherwise datasets would copy it to its cache.
        rows = _datasets().load_dataset(
            "parquet", data_files=str(file), split="train", streaming=True
        )
        yield from _table_documents(rows, field, name)


def _saved_rows(path: Path) -> Iterable[dict]:
    saved = _datasets().load_from_disk(str(path))
    if not isinstance(saved, dict):
        return saved
    if "train" not in saved:
        raise ValueError(
            f"{path} has no 'train' split but {sorted(saved)}. Give the folder of one: "
            f"{path / sorted(saved)[0]}."
        )
    return saved["train"]


def _hub_rows(source: str, split: str, streaming: bool, subset: str | None) -> Iterable[dict]:
    datasets = _datasets()
    try:
        return datasets.load_dataset(source, name=subset, split=split, streaming=streaming)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        # datasets lists the allowed splits and configurations, over several lines.
        reason = " ".join(str(error).split())
        raise ValueError(
            f"source={source!r} is no local path, and the Hub did not give it "
            f"(split={split!r}, subset={subset!r}): {reason}"
        ) from error


def _datasets():
    try:
        import datasets
    except ImportError:
        raise ValueError(
            "This source needs the datasets library. Run: pip install 'parade[train]'"
        ) from None
    return datasets


def _table_documents(rows: Iterable[dict], field: str, name: str) -> Iterator[dict]:
    for index, row in enumerate(rows):
        yield to_document(row, field, f"{name}:{index}", f"{name}, row {index}")


def to_document(row: dict, field: str, default_id: str, where: str) -> dict:
    """One row in the shape of `load_documents`.

    `default_id` stands in where the row has no id column; `where` names the row in errors.
    Raises ValueError naming the row's columns when none of them can be used.
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
    """The row's own id, from whichever column data sets put it in."""
    return next(
        (str(row[column]) for column in _ID_COLUMNS if row.get(column) is not None), default
    )


def _with_input(row: dict, prompt: str) -> str:
    """Alpaca's rows have the material of an instruction in a column of its own."""
    if prompt == "instruction" and row.get("input"):
        return f"{row['instruction']}\n\n{row['input']}"
    return row[prompt]


def _alternating(turns: list[str], where: str) -> list[dict[str, str]]:
    """UltraChat's raw `data`: texts only, the user's first."""
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
        f"{where}: a turn of a chat needs text in 'role' and 'content', or 'from' and 'value', "
        f"but is {str(turn)[:80]!r}."
    )
