"""The grammar that a request asks for: OpenAI's `response_format`, vLLM's `structured_outputs`."""

import json
from collections.abc import Callable, Mapping
from typing import Any

OBJECT = '{"type": "object"}'


def _schema(given: Any) -> str:
    text = given if isinstance(given, str) else json.dumps(given)
    if not text.strip().startswith("{"):
        raise ValueError("a JSON schema is an object")
    return text


def _regex(given: Any) -> str:
    if not isinstance(given, str) or not given:
        raise ValueError("a regular expression is a text")
    return f"/{given}/"


def _choice(given: Any) -> str:
    if not isinstance(given, list) or not given or not all(isinstance(x, str) and x for x in given):
        raise ValueError("a choice is a list of texts")
    return f"start: {' | '.join(json.dumps(text, ensure_ascii=False) for text in given)}"


def _lark(given: Any) -> str:
    if not isinstance(given, str) or "start" not in given:
        raise ValueError("a grammar is a text in Lark's form, with a rule `start`")
    return given


def _object(given: Any) -> str | None:
    return OBJECT if given else None


# By the key of `structured_outputs`: how its value is read.
KINDS: dict[str, Callable[[Any], str | None]] = {
    "json": _schema,
    "regex": _regex,
    "choice": _choice,
    "grammar": _lark,
    "json_object": _object,
}


def wanted(response_format: Mapping[str, Any], outputs: Mapping[str, Any]) -> str | None:
    """Return the grammar (`SamplingParams.grammar`) of a request's two fields; None: any text.

    Raises ValueError for one that is not offered, with the field's name and a `=`.
    """
    asked = {key: value for key, value in outputs.items() if value is not None}
    if asked:
        key, value = next(iter(asked.items()))
        if len(asked) > 1 or key not in KINDS:
            raise ValueError(
                f"structured_outputs={json.dumps(outputs)[:60]} is not offered: give one of "
                f"{', '.join(KINDS)}"
            )
        return _told("structured_outputs", outputs, lambda: KINDS[key](value))
    kind = response_format.get("type", "text")
    if kind == "text":
        return None
    if kind == "json_object":
        return OBJECT
    named = response_format.get("json_schema")
    if kind != "json_schema" or not isinstance(named, dict) or "schema" not in named:
        raise ValueError(
            f"response_format={json.dumps(response_format)[:60]} is not offered: type is text, "
            "json_object, or json_schema with json_schema={name, schema}"
        )
    return _told("response_format", response_format, lambda: _schema(named["schema"]))


def _told(name: str, given: Any, read: Callable[[], str | None]) -> str | None:
    try:
        return read()
    except ValueError as error:
        raise ValueError(f"{name}={json.dumps(given)[:60]} is not allowed: {error}") from None
