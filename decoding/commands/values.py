"""The grammar of `key=value`: text into typed values, and the errors of keys and values.

All commands, recipes and knobs of samplers are read by it:

    null, true, false      in any case
    3, 0.5, 1e-4           numbers; nan and inf are refused
    'some text'            text; quotes are needed only around commas inside a list, or for 'null'
    [1,2], ['a','b']       lists; a single item needs no brackets
    {a: 1, b: [2]}         nodes (recipes only)
    anything else          text, unchanged
"""

import ast
import difflib
import math
import types
import typing
from collections.abc import Iterable
from dataclasses import MISSING
from typing import Any

WORDS = {"null": None, "true": True, "false": False}


def split(argument: str) -> tuple[str, str]:
    """Split 'key=value' into key and value; ValueError for anything of another form."""
    key, equals, value = argument.partition("=")
    if not equals or not key:
        raise ValueError(f"{argument!r} is not of the form key=value")
    return key, value


def unknown(kind: str, given: str, known: Iterable[str]) -> ValueError:
    """The error for a name that does not exist, with the nearest one that does.

    Args:
        kind: What is named: 'key', 'method', ...
        given: The name.
        known: The names that exist.

    Returns:
        The error, to be raised.
    """
    known = sorted(known)
    near = difflib.get_close_matches(str(given), known, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return ValueError(f"unknown {kind} {given!r}.{hint} Choose from {known}")


def read(text: str) -> Any:
    """The value of a text where no type is known.

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
    return _unquoted(text) if number is None else number


def show(value: Any) -> str:
    """A value as a user types it.

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
    """The value of `key=text`.

    Args:
        key: For the error.
        text: The value as the user typed it.
        hint: Its type: str, int, float, bool, tuple[x, ...], dict, x | None, or Any.
        default: For the error.

    Raises:
        ValueError: The value is of another type, or it is nan or infinite.
    """
    try:
        return _typed(text, hint)
    except _Unfit as unfit:
        (value,) = unfit.args
        number = value.strip().lower().lstrip("+-") if isinstance(value, str) else ""
        if number in ("nan", "inf", "infinity") and "float" in type_name(hint):
            raise ValueError(f"{key}={text} is not allowed: it must be a finite number") from None
        known = "" if default is MISSING or hint is dict else f" (default {show(default)})"
        raise ValueError(
            f"{key}={show(value) if value is None else repr(value)} is of type "
            f"{'null' if value is None else type(value).__name__}, "
            f"but {type_name(hint)} is needed{known}"
        ) from None


def fits(value: Any, hint: Any) -> bool:
    """Whether a value is of a type that `convert` takes; a whole number is a float too.

    >>> fits([1, 2.5], tuple[float, ...]), fits(None, int), fits(True, int)
    (True, False, False)
    """
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return any(fits(value, each) for each in typing.get_args(hint))
    if _is_list(hint):
        (item, *_) = typing.get_args(hint) or (Any,)
        return isinstance(value, (list, tuple)) and all(fits(each, item) for each in value)
    if hint is Any:
        return True
    if value is None or hint is types.NoneType:
        return value is None and hint is types.NoneType
    return type(value) in ((float, int) if hint is float else (hint,))


def type_name(hint: Any) -> str:
    """A type as errors and `--help` name it.

    >>> type_name(tuple[int, ...]), type_name(float | None)
    ('list of int', 'float or null')
    """
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        names = ["null" if t is types.NoneType else type_name(t) for t in typing.get_args(hint)]
        return " or ".join(names)
    if _is_list(hint):
        (item, *_) = typing.get_args(hint) or (Any,)
        return "list" if item is Any else f"list of {type_name(item)}"
    return {Any: "any", dict: "a node with keys"}.get(hint) or hint.__name__


def _is_list(hint: Any) -> bool:
    return hint is tuple or typing.get_origin(hint) is tuple


class _Unfit(ValueError):
    """A value of another type than its key takes; the argument is the value."""


def _typed(text: str, hint: Any) -> Any:
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        if text.lower() == "null":
            return None
        kinds = [t for t in typing.get_args(hint) if t is not types.NoneType]
        kinds.sort(key=_is_list)  # last: a single item needs no brackets
        for kind in kinds:
            try:
                return _typed(text, kind)
            except _Unfit:
                if kind == kinds[-1]:
                    raise
    if _is_list(hint):
        (item, *_) = typing.get_args(hint) or (Any,)
        if text.startswith("[") and not text.endswith("]"):
            raise _Unfit(text)
        found = _items(text[1:-1]) if text.startswith("[") else [text]
        return tuple(_typed(each, item) for each in found)
    if hint is str:
        return _unquoted(text)
    value = read(text)
    if hint is float and type(value) is int:
        value = float(value)
    if hint is not Any and type(value) is not hint:
        raise _Unfit(value)
    return value


def _number(text: str) -> int | float | None:
    if "_" in text:  # Python reads 2024_11 as a number; it is a name
        return None
    for kind in (int, float):
        try:
            number = kind(text)
        except ValueError:
            continue
        return number if math.isfinite(number) else None
    return None


def _enclosed(text: str, pair: str) -> bool:
    return len(text) > 1 and text[0] == pair[0] and text[-1] == pair[1]


def _unquoted(text: str) -> str:
    """The content of a quoted text, with Python's escapes; any other text unchanged."""
    if not (_enclosed(text, "''") or _enclosed(text, '""')):
        return text
    try:
        return str(ast.literal_eval(text))
    except (ValueError, SyntaxError):
        return text


def _items(text: str) -> list[str]:
    """The pieces between commas; those inside quotes and brackets do not count."""
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
