"""Document sources: the standard library, local files, saved data sets, the Hugging Face Hub."""

import gzip
import json
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from io import BufferedIOBase
from itertools import chain, count, islice
from pathlib import Path

from huggingface_hub import HfApi

from data.arguments import Count
from data.corpora.chats import content
from data.corpora.conditions import Condition, conditions, keeps
from data.corpora.docstrings import docstring_documents, function_documents, roots
from data.corpora.fingerprints import commit, files_fingerprint
from data.corpora.identity import content_key, distinct_id
from data.corpora.stdlib import check_split, is_held_out, source_files, stdlib_documents
from data.files import atomic_write, files_below, package, parse_json, read_text

# Corpora of the installed Python, by the name of their source.
INSTALLED: dict[str, Callable[[str], list[dict[str, str]]]] = {
    "stdlib": stdlib_documents,
    "docstrings": docstring_documents,
    "functions": function_documents,
}
TEXT_SUFFIXES = (".txt", ".py", ".md")
PATIENCE = 5  # seconds for the Hub to tell a data set's commit
BATCH = 1000  # rows of .parquet that are in memory together
MAX_LINE_BYTES = 2**26  # of .jsonl: a packed file of megabytes may hold one line of gigabytes

Row = tuple[str, str, dict]  # default id, name in error messages, columns


_ID_COLUMNS = ("id", "task_id", "question_id", "prompt_id")


class Document(dict):
    """A document that knows `where` it was read, for error messages: a file and a row."""

    def __init__(self, content: dict, where: str):
        super().__init__(content)
        self.where = where


def load_documents(
    source: str,
    split: str = "train",
    *,
    field: str = "text",
    streaming: bool = False,
    limit: Count | None = None,
    subset: str | None = None,
    where: str | None = None,
) -> Iterable[dict]:
    """Return the documents of a source, read lazily: dicts of one of three shapes.

        {"id", "text": str}
        {"id", "messages": [{"role": str, "content": str, ...}, ...]}
        {"id", "prompt": str, "answer": str}

    A message has the further keys of its turn, such as `tool_calls`, and `train` is False where it
    is not to be trained; `options` of a chat are arguments of the chat template, such as `tools`
    (`data.corpora.chats`).

    An id that the source has for several contents is made distinct by a hash of its content. Hidden
    files and caches of a folder are not read. The first document is read at once, so most errors
    are raised here.

    Args:
        source: `stdlib`; `docstrings` (functions of the standard library and of installed packages,
            as prompt-answer pairs); `functions` (the same, half of the prompts are function heads
            to complete); a file or folder of .txt, .py, .md (one document per file), .jsonl or
            .parquet; a folder written by `Dataset.save_to_disk`; else a Hub data set id.
        split: `train` or `heldout`, separated by a hash of the document's content
            (`data.corpora.identity`), or of its id for a corpus of the installed Python. A Hub data
            set has its own splits too; its `heldout` is taken out of `train` by the same hash.
        field: The text column. If not `text`, it is read even from rows that look like chats or
            pairs.
        streaming: Read a Hub data set without downloading it first.
        limit: Maximum number of documents.
        subset: The configuration of a Hub data set.
        where: Conditions on the rows' columns, such as 'average_test_score>=1'
            (`data.corpora.conditions`); `limit` counts only rows that meet them.

    Raises:
        ValueError: For a missing path, an unknown split, a missing column, an invalid line, a
            condition on rows without columns, or a source without documents.
    """
    asked = conditions(where)
    documents = islice(_documents(source, split, field, streaming, subset, asked), limit)
    first = next(documents, None)
    if first is None:
        raise ValueError(
            f"source={source!r} has no document in split={split!r}"
            f"{'' if where is None else f' with where={where!r}'}. "
            "About one document in forty is held out, and equal ones together: give a larger "
            f"corpus or another split.{one_document(source)}"
        )
    return chain([first], documents)


def is_own(source: str) -> bool:
    """Return whether a source is a file or folder of this machine, of whatever size it is."""
    return source not in INSTALLED and Path(source).expanduser().exists()


def one_document(source: str) -> str:
    """Return a sentence on how to give many texts, for a file that is one document; else ''."""
    path = Path(source).expanduser()
    if path.suffix not in TEXT_SUFFIXES or not path.is_file():
        return ""
    return (
        f" A {path.suffix} file is one document, whatever its lines: for many texts or prompts "
        'give a .jsonl file with a line {"text": "..."} for each.'
    )


def content_fingerprint(source: str, folder: str | Path) -> str:
    """Return the fingerprint of what a source of `load_documents` holds now.

    It covers the files that are read; for a Hub data set it is the commit, which is noted in the
    folder of a cache and read there where the Hub cannot be reached. A path is no part of it,
    except for a saved data set, whose rows have ids of it.
    """
    path = Path(source).expanduser()
    if source in INSTALLED:
        return f"{source}@{_installed_fingerprint(() if source == 'stdlib' else roots())}"
    if path.exists():
        found = files_fingerprint(_read_files(path).items())
        return f"{source}@{found}" if _is_saved(path) else found
    if _looks_like_a_path(source):  # loading it says that it is missing
        return source
    note = Path(folder) / f"{source.replace('/', '--')}.commit"
    try:
        revision = HfApi().dataset_info(source, timeout=PATIENCE).sha
        note.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(note) as temporary:
            temporary.write_text(str(revision))
    except Exception:  # of the network, of the Hub: loading the data set says it, if it is needed
        revision = note.read_text() if note.is_file() else commit(source)
    return f"{source}@{revision}"


@cache
def _installed_fingerprint(more: tuple[str, ...]) -> str:
    """Return the fingerprint of the standard library's sources, and of those in more folders."""
    files: dict[str, Path] = {}
    for folder in (sysconfig.get_path("stdlib"), *more):
        files |= {f"{folder}/{name}": file for name, file in source_files(Path(folder)).items()}
    return files_fingerprint(files.items())


def _read_files(path: Path) -> dict[str, Path]:
    """Return the files of a local source that are read, by their names in it."""
    if _is_saved(path):
        return {p.relative_to(path).as_posix(): p for p in sorted(path.rglob("*")) if p.is_file()}
    files = [path] if path.is_file() else files_below(path)[0]
    kinds = ((".parquet",), (".jsonl",), TEXT_SUFFIXES)
    read = next((r for kind in kinds if (r := [f for f in files if f.suffix in kind])), [])
    root = path.parent if path.is_file() else path
    named = {file.relative_to(root).as_posix(): file for file in read if file.is_file()}
    return dict(sorted(named.items()))


def _is_saved(path: Path) -> bool:
    return (path / "dataset_info.json").exists() or (path / "dataset_dict.json").exists()


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
        documents = _local_documents(path, field, asked)
    elif _looks_like_a_path(source):
        raise ValueError(
            f"source={source!r} does not exist (looked in {Path.cwd()}). "
            f"Give one of {', '.join(map(repr, INSTALLED))}, a local file or folder, or a Hub data "
            "set id such as 'org/name'."
        )
    else:
        table = _hub_table(source, "train" if split == "heldout" else split, streaming, subset)
        documents = _to_documents(_numbered(table, source), field, asked)
        if split not in ("train", "heldout"):  # used whole: no documents were held out of it
            return documents
    return (d for d in documents if is_held_out(content_key(d)) == (split == "heldout"))


def _check_columns(source: str, asked: list[Condition]) -> None:
    if asked:
        raise ValueError(
            f"source={source!r} has texts without columns, so where= has nothing to compare: "
            "leave it out"
        )


def _looks_like_a_path(source: str) -> bool:
    return (
        source.startswith((".", "/", "~"))
        or source.count("/") > 1
        or Path(source).suffix in (*TEXT_SUFFIXES, ".jsonl", ".parquet")
    )


def _local_documents(path: Path, field: str, asked: list[Condition]) -> Iterator[dict]:
    if _is_saved(path):
        return _to_documents(_numbered(_saved_table(path), str(path)), field, asked)
    files = _read_files(path)
    if files and path.is_dir():
        _say_what_is_read(path, len(files))
    if files and next(iter(files.values())).suffix in TEXT_SUFFIXES:
        _check_columns(str(path), asked)
        return _text_documents(files)
    if files:
        rows = chain.from_iterable(read_rows(file, name) for name, file in files.items())
        return _to_documents(rows, field, asked)
    raise ValueError(
        f"source={str(path)!r} has no readable files. "
        f"Allowed: {', '.join(TEXT_SUFFIXES)}, .jsonl and .parquet files, "
        "or a folder written by Dataset.save_to_disk."
    )


@cache
def _say_what_is_read(path: Path, read: int) -> None:
    """Print, once, how many of a folder's files are read and how many are left out."""
    meant, others = map(len, files_below(path))
    why = f"{others} hidden or of caches, {meant - read} of other kinds"
    print(f"{path}: {read} files are read, {others + meant - read} left out ({why})")


def _text_documents(files: dict[str, Path]) -> Iterator[dict]:
    for id, file in files.items():
        yield Document({"id": id, "text": read_text(file)}, str(file))


def read_rows(file: Path, name: str) -> Iterator[Row]:
    """Yield the rows of a .jsonl, .jsonl.gz or .parquet file; `name` prefixes their ids."""
    if file.suffix == ".parquet":
        return _numbered(_parquet_table(file), name, file)
    return read_jsonl(file, name)


def _numbered(table: Iterable[dict], name: str, where: object = None) -> Iterator[Row]:
    for index, row in enumerate(table):
        yield f"{name}:{index}", f"{where or name}, row {index}", row


def read_jsonl(file: Path, name: str = "") -> Iterator[Row]:
    """Yield the rows of a .jsonl or .jsonl.gz file, of lines of at most `MAX_LINE_BYTES`."""
    with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as lines:
        for number, line in enumerate(_lines(lines, file), start=1):
            here = f"{file}, line {number}"
            try:
                # An editor's mark at the beginning is no part of the text.
                if not (text := line.decode("utf-8-sig").strip()):
                    continue
                row = parse_json(text)
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{here} is not UTF-8 text (byte {error.start}). Convert it, "
                    "or, if it is packed, unpack it first."
                ) from None
            except ValueError as error:
                reason = error.msg if isinstance(error, json.JSONDecodeError) else error
                raise ValueError(f"{here} is not valid JSON: {reason}.") from None
            if not isinstance(row, dict):
                raise ValueError(f"{here} is not a JSON object but {type(row).__name__}.")
            yield f"{name}:{number}", here, row


def _lines(stream: BufferedIOBase, file: Path) -> Iterator[bytes]:
    """Yield the lines of a file, unpacked; ValueError for one over `MAX_LINE_BYTES`."""
    try:
        for number in count(1):
            line = stream.readline(MAX_LINE_BYTES + 1)
            if len(line) > MAX_LINE_BYTES:
                raise ValueError(
                    f"{file}, line {number} has over {MAX_LINE_BYTES:,} bytes (max_line_bytes): "
                    "split it into several"
                )
            if not line:
                return
            yield line
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{file} is not a whole gzip file: {error}") from None


def _parquet_table(file: Path) -> Iterator[dict]:
    # Not by datasets: it would follow what the file itself asks for, such as images at an address.
    parquet, lib = (
        package(f"pyarrow.{name}", "this source", "'parade[train]'") for name in ("parquet", "lib")
    )
    try:
        with parquet.ParquetFile(file) as table:
            for batch in table.iter_batches(BATCH):
                yield from batch.to_pylist()
    except (OSError, ValueError, lib.ArrowException) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{file} is not a whole parquet file: {reason}") from None


def _saved_table(path: Path) -> Iterable[dict]:
    try:
        saved = _datasets().load_from_disk(str(path))
    except Exception as error:  # of any kind where its files are damaged
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise ValueError(f"{path} is no whole folder of Dataset.save_to_disk: {reason}") from None
    if not isinstance(saved, dict):
        return saved
    if "train" not in saved:
        raise ValueError(
            f"{path} has no 'train' split but {sorted(saved)}. Give the folder of a split: "
            f"{path / sorted(saved)[0]}."
        )
    return saved["train"]


def _hub_table(source: str, split: str, streaming: bool, subset: str | None) -> Iterable[dict]:
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
    return package("datasets", "this source", "'parade[train]'")


def _to_documents(rows: Iterable[Row], field: str, asked: list[Condition]) -> Iterator[dict]:
    seen: dict[int, int] = {}
    for default_id, where, row in rows:
        if keeps(row, asked, where):
            found = content(row, field, where)
            id = row_id(row, default_id)
            if id != default_id:  # which is the only one
                id = distinct_id(id, content_key(found), seen)
            yield Document({"id": id, **found}, where)


def row_id(row: dict, default: str) -> str:
    """Return the id of a row: the first id column that it has, else `default`."""
    return next(
        (str(row[column]) for column in _ID_COLUMNS if row.get(column) is not None), default
    )
