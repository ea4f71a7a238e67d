"""Instructions made from docstrings: "Write a Python function `name(args)`. <docstring>".

They come from the functions of the standard library and of the installed packages, so they need
no network; which ones there are depends on what is installed.
"""

import ast
import re
import sysconfig
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from data.corpora.stdlib import Split, check_split, is_held_out, source_files

LONGEST = 2000  # characters of a prompt; longer ones are manuals, which leave no room to answer

# A function at the left margin, up to the next line at the margin that is not the end of
# its signature or a comment. Files are not parsed whole: that takes six times as long.
_FUNCTION = re.compile(
    r"^(?:async[ \t]+)?def[ \t]+\w+[ \t]*\(.*\n(?:(?:[ \t)#].*)?\n)*", re.MULTILINE
)


def docstring_documents(split: Split) -> list[dict[str, str]]:
    """A document for every top-level function that has a docstring.

    Two functions of the same name, arguments and docstring give one document: the first one's.
    Code that this Python cannot parse, methods, and prompts of more than
    `LONGEST` characters are left out.

    Returns:
        Documents `{"id": "path/of/module.py:name", "prompt": instruction, "answer": source of the
        function}`: those of the standard library, then those of the packages, sorted by path.

    Raises:
        ValueError: for an unknown split, or if there are no source files.
    """
    check_split(split)
    roots = {name: sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}
    documents = _documents(tuple(dict.fromkeys(roots.values())))
    if not documents:
        raise ValueError(
            f"source='docstrings' found no functions in {sorted(set(roots.values()))}: this "
            "Python was installed without sources. Use another Python, or give a file of prompts."
        )
    held_out = split == "heldout"
    return [document for document in documents if is_held_out(document["id"]) == held_out]


@cache
def _documents(roots: tuple[str, ...]) -> tuple[dict[str, str], ...]:
    """The documents of all files below some folders: unique prompts, and unique ids."""
    by_prompt, ids = {}, set()
    for root in roots:
        for path, file in source_files(Path(root)).items():
            for name, prompt, answer in _functions(_text(file)):
                id = f"{path}:{name}"
                if prompt not in by_prompt and id not in ids:
                    ids.add(id)
                    by_prompt[prompt] = {"id": id, "prompt": prompt, "answer": answer}
    return tuple(by_prompt.values())


def _text(file: Path) -> str:
    """A file's text; of a file that cannot be read, or in an old encoding, nothing."""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def _functions(text: str) -> Iterator[tuple[str, str, str]]:
    """Name, instruction and source of the functions of a file that become documents."""
    for match in _FUNCTION.finditer(text):
        source = match[0].rstrip()
        node = _parsed(source) if '"""' in source or "'''" in source else None
        docstring = ast.get_docstring(node) if node else None
        if docstring:
            prompt = f"Write a Python function `{node.name}({ast.unparse(node.args)})`. {docstring}"
            if len(prompt) <= LONGEST:
                yield node.name, prompt, source


def _parsed(source: str) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escape sequences in the docstrings of others
            [node] = ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError):
        return None
    return node
