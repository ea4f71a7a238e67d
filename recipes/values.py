"""The grammar of `key=value`: text into typed values, and the errors of keys and values.

All commands, recipes and sampler options use it:

    null, true, false      in any case
    3, 0.5, 1e-4           numbers; nan and inf are refused
    'some text'            text; quotes are needed only around commas inside a list, or for 'null'
    [1,2], ['a','b']       lists; a single item needs no brackets
    {a: 1, b: [2]}         nodes (recipes only)
    ~/folder               text: a path in the home folder, as a shell reads it; ./~ is named so
    anything else          text, unchanged

A type is an annotation that pydantic checks: `Annotated[int, Field(ge=1)]`, `Literal["a", "b"]`,
lists of these (`tuple[int, ...]`), and `| None`.
"""

import ast
import difflib
import functools
import math
import os
import re
import types
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import MISSING, is_dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin, is_typeddict

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from data.files import shortened

WORDS = {"null": None, "true": True, "false": False}
VERBATIM = "verbatim"  # in an annotation: quotes around the text belong to it, and it is no path
LARGEST = 2**31 - 1  # of an integer whose type has no limit


class WrongType(ValueError):
    """An error for a value of another type than its key takes."""


def split(argument: str) -> tuple[str, str]:
    """Split 'key=value' into key and value; raise ValueError for any other form."""
    key, equals, value = argument.partition("=")
    if not equals or not key:
        raise ValueError(f"{argument!r} is not of the form key=value")
    return key, value


def unknown(kind: str, given: str, known: Iterable[str]) -> ValueError:
    """Return the error for an unknown name of a kind ('key', ...), with the nearest known name."""
    known = sorted(known)
    near = difflib.get_close_matches(str(given), known, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return ValueError(f"unknown {kind} {given!r}.{hint} Choose from {known}")


def read(text: str) -> Any:
    """Return the value of a text of unknown type.

    >>> read("[1, 2.5, null, 'a, b', c]")
    [1, 2.5, None, 'a, b', 'c']
    """
    text = text.strip()
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    if _enclosed(text, "[]"):
        return [read(item) for item in _items(text[1:-1])]
    if _enclosed(text, "{}"):
        pairs = (item.partition(":") for item in _items(text[1:-1]))
        return {key.strip(): read(value) for key, _, value in pairs}
    number = _number(text)
    return _value(text) if number is None or not math.isfinite(number) else number


def show(value: Any) -> str:
    """Return a value as a user types it.

    >>> show((1, None, "a"))
    '[1,null,a]'
    """
    if value is None or isinstance(value, bool):
        return next(word for word, known in WORDS.items() if known is value)
    if isinstance(value, (tuple, list)):
        return f"[{','.join(map(show, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k}: {show(v)}" for k, v in value.items()) + "}"
    return repr(value) if isinstance(value, str) and not value.isprintable() else str(value)


def convert(key: str, text: str, hint: Any, default: Any = MISSING) -> Any:
    """Return the value of `key=text` by its type, `hint`; key and default are for the error."""
    hint, problem = plain(hint), None
    for value in _readings(text, hint):
        try:
            return check(key, value, hint, default)
        except ValueError as error:
            if problem is None or isinstance(problem, WrongType):
                problem = error
    assert problem is not None  # there is a reading, at least
    raise problem


def check(key: str, value: Any, hint: Any, default: Any = MISSING) -> Any:
    """Return a value converted to its type (integer to float, list to tuple), or raise ValueError.

    A type that no command line can express takes anything; a value of another type is a
    `WrongType`.
    """
    return check_json(key, _tuples(value), plain(hint), default)


def check_json(key: str, value: Any, hint: Any, default: Any = MISSING) -> Any:
    """Return a value of JSON, checked by its whole type; raise ValueError of one line otherwise."""
    try:
        return _adapter(hint).validate_python(value)
    except ValidationError as invalid:
        raise _refused(key, value, hint, invalid.errors(), default) from None


def _refused(key: str, value: Any, hint: Any, problems: list, default: Any) -> ValueError:
    """Return a one-line error for pydantic's findings, limits before types."""
    for problem in problems:
        kind, (_, should, must) = problem["type"], problem["msg"].partition("should ")
        if kind == "value_error":  # of a function in the annotation
            return problem["ctx"]["error"]
        if kind == "literal_error":
            return unknown(key, problem["input"], re.findall("'(.*?)'", problem["ctx"]["expected"]))
        if kind == "too_short" and problem["input"]:  # it counts only the items that are right
            continue
        if should and kind != "none_required" and not kind.endswith("_type"):
            who = "each" if isinstance(value, tuple) and value else "it"
            return ValueError(f"{key}={_brief(value)} is not allowed: {who} must {must}")
    value = problems[0]["input"]
    known = "" if default is MISSING or "{" in show(default) else f" (default {show(default)})"
    return WrongType(
        f"{key}={repr(_brief(value)) if isinstance(value, str) else _brief(value)} is of type "
        f"{type_name(type(value))}, but {type_name(hint)} is needed{known}"
    )


def _brief(value: Any) -> str:
    """Return a value for an error message, cut where a file's is long."""
    if isinstance(value, (dict, list)):
        return shortened(value)
    return f"{value[:97]}..." if isinstance(value, str) and len(value) > 100 else show(value)


def type_name(hint: Any) -> str:
    """Return a type as errors and `--help` name it.

    >>> type_name(tuple[int, ...]), type_name(float | None), type_name(Literal["a", "b"])
    ('list of int', 'float or null', 'a | b')
    """
    kinds = members(hint)
    if len(kinds) > 1:
        return " or ".join(map(type_name, kinds))
    (kind,) = kinds
    if _is_list(kind):
        (item, *_) = get_args(kind) or (Any,)
        return "list" if item is Any else f"list of {type_name(item)}"
    if get_origin(kind) is Literal:
        return " | ".join(map(str, get_args(kind)))
    return {Any: "any", dict: "a node with keys", types.NoneType: "null"}.get(kind) or kind.__name__


def members(hint: Any) -> list[Any]:
    """Return the alternatives of a type, without limits."""
    if get_origin(hint) is Annotated:
        return members(get_args(hint)[0])
    if get_origin(hint) in (types.UnionType, Union):
        return [kind for each in get_args(hint) for kind in members(each)]
    return [hint]


@functools.cache
def plain(hint: Any) -> Any:
    """Return the part of an annotation that values of a command line can have.

    Lists of any kind become tuples, integers get a largest value, and all but numbers, texts,
    switches and nodes becomes Any.
    """
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is int:
        return Annotated[int, Field(ge=-LARGEST, le=LARGEST)]
    if hint in (str, float, bool, tuple, types.NoneType) or origin is Literal:
        return hint
    if dict in (hint, origin) or is_dataclass(hint) or is_typeddict(hint):
        return dict
    if origin is Annotated:
        base = plain(arguments[0])
        return base if base in (Any, dict) else Annotated[base, *arguments[1:]]
    if origin in (types.UnionType, Union):
        kinds = [plain(each) for each in arguments]
        return Any if Any in kinds else Union[tuple(kinds)]  # noqa: UP007 (of a list)
    if origin is tuple and arguments[-1] is not ...:
        return tuple.__class_getitem__(tuple(plain(each) for each in arguments))
    if origin in (list, tuple, Sequence):
        return tuple.__class_getitem__((plain(arguments[0]), ...))
    return Any


@functools.cache
def _adapter(hint: Any) -> TypeAdapter:
    return TypeAdapter(hint, config=ConfigDict(strict=True, allow_inf_nan=False))


def _tuples(value: Any) -> Any:
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    return tuple(map(_tuples, value)) if is_list else value


def _is_list(kind: Any) -> bool:
    return kind is tuple or get_origin(kind) is tuple


def _readings(text: str, hint: Any) -> Iterator[Any]:
    """Yield the values that a text may stand for, as its type has text, other values, or lists."""
    kinds = members(hint)
    if types.NoneType in kinds and text.lower() == "null":
        yield None
        return
    lists = [kind for kind in kinds if _is_list(kind)]
    scalars = [kind for kind in kinds if kind not in (*lists, types.NoneType)]
    texts = [kind for kind in scalars if kind is str or get_origin(kind) is Literal]
    if len(texts) < len(scalars):
        number = _number(text) if float in scalars else None
        yield read(text) if number is None else number
    in_brackets = lists and _enclosed(text, "[]") and not _is_verbatim(hint)
    if texts and not in_brackets:
        yield text if _is_verbatim(hint) else _value(text)
    for kind in lists:  # last: a single item needs no brackets
        if not text.startswith("["):
            items = [text]
        elif text.endswith("]"):
            items = _items(text[1:-1])
        else:
            yield text
            continue
        (item, *_) = get_args(kind) or (Any,)
        if _is_verbatim(item):  # quotes around an item are the list's
            yield tuple(map(_unquoted, items))
        else:
            yield tuple(next(_readings(each, item)) for each in items)


def _is_verbatim(hint: Any) -> bool:
    return any(VERBATIM in getattr(each, "__metadata__", ()) for each in (hint, *get_args(hint)))


def _number(text: str) -> int | float | None:
    if "_" in text:  # Python reads 2024_11 as a number; it is a name
        return None
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return None


def _enclosed(text: str, pair: str) -> bool:
    return len(text) > 1 and text[0] == pair[0] and text[-1] == pair[1]


def _value(text: str) -> str:
    """Return the value of a text: without quotes, and with the home folder for a leading `~`.

    Every path of every command is read here, so that none of its keys can forget it.
    """
    return os.path.expanduser(_unquoted(text))


def _unquoted(text: str) -> str:
    """Return the content of a quoted text, with Python's escapes; any other text unchanged."""
    if not (_enclosed(text, "''") or _enclosed(text, '""')):
        return text
    try:
        return str(ast.literal_eval(text))
    except (ValueError, SyntaxError):
        return text


def _items(text: str) -> list[str]:
    """Return the pieces between commas, except commas inside quotes and brackets."""
    found, depth, quote, before = [""], 0, "", ","
    for c in text:
        if quote:
            quote = "" if c == quote and before != "\\" else quote
        elif c in "'\"" and before in ",[{(:":  # not the apostrophe of a word
            quote = c
        else:
            depth += (c in "[{(") - (c in "]})")
        if c == "," and not depth and not quote:
            found.append("")
        else:
            found[-1] += c
        before = c if not c.isspace() or quote else before
    return [item.strip() for item in found if item.strip()]
