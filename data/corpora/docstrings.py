"""Instructions made from docstrings: "Write a Python function `name(args)`. <docstring>".

Or "Complete this function", with its head up to the docstring. The functions are those of the
standard library and of installed packages: no network is needed, but the set depends on the
installation.
"""

import ast
import re
import sysconfig
import warnings
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from data.corpora.stdlib import check_split, is_held_out, source_files

LONGEST = 2000  # characters of a prompt; longer ones are manuals, which leave no room to answer

# A function at the left margin, up to the next line at the margin that is not the end of
# its signature or a comment. Files are not parsed whole: that takes six times as long.
_FUNCTION = re.compile(
    r"^(?:async[ \t]+)?def[ \t]+\w+[ \t]*\(.*\n(?:(?:[ \t)#].*)?\n)*", re.MULTILINE
)


@dataclass(frozen=True)
class _Function:
    id: str
    words: str  # the instruction in words
    head: str  # the source up to the end of the docstring
    source: str


def docstring_documents(split: str) -> list[dict[str, str]]:
    """Return a document for every top-level function that has a docstring.

    Duplicates (same name, arguments and docstring), code that this Python cannot parse, methods,
    and prompts of more than `LONGEST` characters are left out.

    Returns:
        Documents `{"id": "path/of/module.py:name", "prompt": instruction, "answer": source of the
        function}`: the standard library's, then the packages', sorted by path.
    """
    functions = _of_split(split, "docstrings")
    return [{"id": f.id, "prompt": f.words, "answer": f.source} for f in functions]


def function_documents(split: str) -> list[dict[str, str]]:
    """Return the same documents, but half of the prompts are function heads to complete.

    Such an answer begins as its prompt ends, which teaches a drafter to copy. A hash of the id
    chooses the form.
    """
    found = []
    for f in _of_split(split, "functions"):
        by_code = f"Complete this function:\n\n```python\n{f.head}\n```"
        hashed = zlib.crc32(f"{f.id} by code".encode())  # not the hash that separates the splits
        found.append({"id": f.id, "prompt": by_code if hashed % 2 else f.words, "answer": f.source})
    return found


def roots() -> tuple[str, ...]:
    """Return the folders of the standard library and of installed packages."""
    names = ("stdlib", "purelib", "platlib")
    return tuple(dict.fromkeys(sysconfig.get_path(name) for name in names))


def _of_split(split: str, source: str) -> list[_Function]:
    check_split(split)
    functions = _functions(roots())
    if not functions:
        raise ValueError(
            f"source={source!r} found no functions in {sorted(roots())}: this "
            "Python was installed without sources. Use another Python, or give a file of prompts."
        )
    held_out = split == "heldout"
    return [function for function in functions if is_held_out(function.id) == held_out]


@cache
def _functions(roots: tuple[str, ...]) -> tuple[_Function, ...]:
    """Return the functions of all files below some folders: unique instructions, and unique ids."""
    by_words, ids = {}, set()
    for root in roots:
        for path, file in source_files(Path(root)).items():
            for function in _of_module(_text(file), path):
                if function.words not in by_words and function.id not in ids:
                    ids.add(function.id)
                    by_words[function.words] = function
    return tuple(by_words.values())


def _text(file: Path) -> str:
    """Return a file's text; an empty text if it cannot be read or decoded."""
    try:
        return file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError):
        return ""


def _of_module(text: str, path: str) -> Iterator[_Function]:
    """Yield the module's functions that become documents."""
    for match in _FUNCTION.finditer(text):
        source = match[0].rstrip()
        node = _parsed(source) if '"""' in source or "'''" in source else None
        if node and (docstring := ast.get_docstring(node)):
            words = f"Write a Python function `{node.name}({ast.unparse(node.args)})`. {docstring}"
            head = "\n".join(source.splitlines()[: node.body[0].end_lineno])
            if len(words) <= LONGEST:
                yield _Function(f"{path}:{node.name}", words, head, source)


def _parsed(source: str) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escape sequences in the docstrings of others
            [node] = ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError):
        return None
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)  # as `_FUNCTION` matches
    return node
