"""The content of a data set's row: a text, a prompt with its answer, or a chat.

Chats are read as TRL, axolotl and LlamaFactory read them: with what stands beside the turns (system
prompt, earlier turns, tools, arguments of the chat template) and with what a turn says of itself
(thoughts, tool calls, whether it is trained). What would change the training and cannot be read is
refused, with the row and the column.
"""

from collections.abc import Iterable, Iterator
from itertools import cycle
from typing import Any

from data.files import parse_json, shortened

Message = dict[str, Any]

CHATS = ("messages", "conversations", "conversation")
PAIRS = (
    ("prompt", "answer"), ("prompt", "response"), ("prompt", "completion"), ("question", "answer"),
    ("question", "response"), ("problem", "solution"), ("instruction", "response"),
    ("instruction", "output"), ("input", "output"),
)  # fmt: skip
SYSTEM = ("system", "system_prompt", "system_message")
# Columns that say more than the turns do; `options` are arguments of the chat template.
TOOLS, OPTIONS, HISTORY = "tools", "chat_template_kwargs", "history"
UNREAD = {
    **dict.fromkeys(("image", "images", "video", "videos", "audio", "audios"), "only text is read"),
    "functions": "give them as 'tools'",
}
WEIGHTS = ("weight", "loss_weight", "sample_weight", "train", "loss")  # of a whole row

# How data sets spell the roles of chat templates, in any case.
ROLES = {
    "system": ("system", "developer"),
    "user": ("user", "human", "prompter", "input", "question", "instruction", "customer"),
    "assistant": (
        "assistant", "gpt", "chatgpt", "gpt4", "gpt-4", "bing", "bard", "gemini", "claude", "model",
        "llm", "ai", "bot", "chatbot", "agent", "output", "answer", "response",
    ),
    "tool": ("tool", "function", "observation", "ipython", "tool_response", "function_response"),
}  # fmt: skip
_ROLE_OF = {spelling: role for role, spellings in ROLES.items() for spelling in spellings}
CALLS = ("function_call", "tool_call")  # roles of an assistant's turn that is a call, as JSON
# What a turn may say about its training. `train` of another role's turn asks to train that too.
FLAGS = ("weight", "loss", "train", "training", "trained")
DETAILS = ("train_detail", "training_detail")  # of parts of a turn
_READ = ("role", "from", "content", "value", *FLAGS)


def content(row: dict, field: str, where: str) -> dict:
    """Return the content of a row, in one of the shapes of `load_documents`; `where` names it."""
    if field == "text":
        if turns := _turns(row, where):
            return _chat(row, turns, where)
        for prompt, answer in PAIRS:
            if isinstance(row.get(prompt), str) and isinstance(row.get(answer), str):
                more = row.get("input") if prompt == "instruction" else None  # Alpaca's
                asked = f"{row[prompt]}\n\n{more}" if more else row[prompt]
                if not {*beside(row)} & {*SYSTEM, HISTORY, TOOLS, OPTIONS}:
                    _check_row(row, where)
                    return {"prompt": asked, "answer": row[answer]}
                turns = [{"role": "user", "content": asked},
                         {"role": "assistant", "content": row[answer]}]  # fmt: skip
                return _chat(row, [*_history(row, where), *turns], where)
    if not isinstance(row.get(field), str):
        empty = (
            [c for c in CHATS if isinstance(row.get(c), list | tuple)] if field == "text" else []
        )
        if empty:
            raise ValueError(f"{where}: {empty[0]!r} is a chat without turns")
        raise ValueError(
            f"{where}: no text in column {field!r}. It has {sorted(row)}. Allowed: {field!r}, "
            "or name another with field=, or chats in 'messages' or 'conversations', or two "
            "columns such as 'prompt' and 'answer'."
        )
    return {"text": row[field]}


def beside(row: dict) -> list[str]:
    """Return the columns, with a value, that change what a prompt or a chat says."""
    return [c for c in (*SYSTEM, HISTORY, TOOLS, OPTIONS, *UNREAD) if _known(row.get(c))]


def _known(value: Any) -> bool:
    """Return whether a cell says something: no null, no empty text, list or object."""
    return value not in (None, "", "[]", "{}") and not (
        isinstance(value, list | tuple | dict) and not value
    )


def _turns(row: dict, where: str) -> list[Message]:
    """Return the messages of a row's turns; none where it has no column of turns."""
    for column in CHATS:
        if turns := row.get(column):
            if not isinstance(turns, list | tuple):
                raise ValueError(
                    f"{where}: {column!r} needs a list of turns, but is {shortened(turns)}"
                )
            if _known(row.get(HISTORY)):
                raise ValueError(f"{where}: {HISTORY!r} is not read with turns in {column!r}")
            return [_message(turn, where) for turn in turns]
    if isinstance(turns := row.get("data"), list):  # UltraChat's raw texts, the user first
        roles = cycle(("user", "assistant"))
        return [_message({"role": r, "content": turn}, where) for r, turn in zip(roles, turns)]
    # TRL's prompts and completions that are turns; only the completion is trained.
    if isinstance(asked := row.get("prompt"), list | tuple) and all(
        isinstance(turn, dict) for turn in asked
    ):
        answered = row.get("completion") or []
        if {"chosen", "rejected"} & {*row} or not isinstance(answered, list | tuple):
            return []
        told = [_message(turn, where) for turn in asked]
        told = [m | {"train": False} if m["role"] == "assistant" else m for m in told]
        return told + [_message(turn, where) for turn in answered]
    return []


def _chat(row: dict, messages: list[Message], where: str) -> dict:
    """Return the document of a chat, with what stands beside its turns."""
    _check_row(row, where)
    for column in SYSTEM:
        if not _known(told := row.get(column)):
            continue
        if not isinstance(told, str):
            raise ValueError(f"{where}: {column!r} needs a text, but is {shortened(told)}")
        if messages[0]["role"] != "system":
            messages = [{"role": "system", "content": told}, *messages]
        elif messages[0]["content"].strip() != told.strip():
            raise ValueError(
                f"{where}: {column!r} and the chat's first turn are two system prompts: "
                f"{shortened(told)} and {shortened(messages[0]['content'])}"
            )
    options = _object(row.get(OPTIONS), dict, f"{where}: {OPTIONS!r}") or {}
    if tools := _object(row.get(TOOLS), list, f"{where}: {TOOLS!r}"):
        options = {**options, "tools": tools}
    return {"messages": messages, **({"options": options} if options else {})}


def _check_row(row: dict, where: str) -> None:
    """Raise ValueError for a column of a chat or pair that changes training and is not read."""
    for column, advice in UNREAD.items():
        if _known(row.get(column)):
            raise ValueError(f"{where}: the column {column!r} is not read: {advice}")
    for column in WEIGHTS:
        value = row.get(column)
        if column in ("train", "loss") and not isinstance(value, bool):  # a number measures
            continue
        if value is not None and value != 1:
            raise ValueError(
                f"{where}: the column {column!r} is {shortened(value)}, and rows all weigh the "
                f"same: leave such rows out, or the column (turns may have a weight of 0 or 1)"
            )


def _history(row: dict, where: str) -> Iterator[Message]:
    """Yield the earlier turns of Alpaca's `history`, pairs of a question and an answer."""
    history = row.get(HISTORY)
    if not _known(history):
        return
    for pair in history if isinstance(history, list | tuple) else [history]:
        if isinstance(pair, dict):
            yield _message(pair, where)
        elif isinstance(pair, list | tuple) and [*map(type, pair)] == [str, str]:
            yield {"role": "user", "content": pair[0]}
            yield {"role": "assistant", "content": pair[1]}
        else:
            raise ValueError(
                f"{where}: {HISTORY!r} needs a list of [question, answer], but has "
                f"{shortened(pair)}"
            )


def _message(turn: Any, where: str) -> Message:
    """Return a turn as chat templates read it; `train` is False where it is not to be trained."""
    if not isinstance(turn, dict):
        raise _no_turn(turn, where)
    given = next((turn[k] for k in ("role", "from") if turn.get(k) is not None), None)
    text = next((turn[k] for k in ("content", "value") if turn.get(k) is not None), None)
    more = {k: _clean(v) for k, v in turn.items() if k not in _READ and _known(v)}
    if not isinstance(given, str):
        raise _no_turn(turn, where)
    spelling = given.strip().lower()
    if spelling in CALLS:
        call = _object(text, dict, f"{where}: a turn of {given!r}")
        more["tool_calls"], text, spelling = [{"type": "function", "function": call}], "", "gpt"
    if spelling not in _ROLE_OF:
        known = "; ".join(f"{r}: {', '.join(s)}" for r, s in ROLES.items())
        raise ValueError(f"{where}: unknown role {shortened(given)} of a turn. Known are {known}")
    role = _ROLE_OF[spelling]
    if isinstance(calls := more.get("tool_calls"), list):
        more["tool_calls"] = [_call(call, where) for call in calls]
        text = "" if text is None else text
    if not isinstance(text, str):
        raise _no_turn(turn, where)
    message = {"role": role, "content": text, **more}
    return message if _trained(turn, role, where) else message | {"train": False}


def _no_turn(turn: Any, where: str) -> ValueError:
    return ValueError(
        f"{where}: a chat turn needs text in 'role' and 'content', or in 'from' and 'value', "
        f"but is {shortened(turn)}."
    )


def _trained(turn: dict, role: str, where: str) -> bool:
    """Return whether a turn's own flags let it be trained."""
    if found := [key for key in DETAILS if _known(turn.get(key))]:
        raise ValueError(f"{where}: {found[0]!r} of a turn is not read: turns are trained whole")
    flags = {key: turn[key] for key in FLAGS if turn.get(key) is not None}
    for key, value in flags.items():
        if value not in (0, 1):
            raise ValueError(
                f"{where}: {key}={shortened(value)} of a turn is not allowed: 0 or false leaves it "
                "out of the training, 1 or true does not"
            )
        if value and role != "assistant" and key in ("train", "training"):
            raise ValueError(
                f"{where}: {key}={shortened(value)} of a turn of {role!r}: only an assistant's "
                "turns are trained"
            )
    return all(flags.values())


def _call(call: Any, where: str) -> Any:
    """Return a tool call with its arguments as an object, as templates expect; OpenAI's is text."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if isinstance(function, dict) and isinstance(function.get("arguments"), str):
        read = _object(function["arguments"], dict, f"{where}: 'arguments' of a tool call")
        function = {**function, "arguments": read or {}}
        return {**call, "function": function} if "function" in call else function
    return call


def _object(value: Any, kind: type, what: str) -> Any:
    """Return a list or an object that a cell holds, itself or as JSON; None for an empty cell."""
    if not _known(value):
        return None
    try:
        found = parse_json(value) if isinstance(value, str) else value
    except ValueError:
        found = None
    if not isinstance(found, kind):
        name = "a list" if kind is list else "an object"
        raise ValueError(f"{what} needs {name}, or its JSON text, but is {shortened(value)}")
    return _clean(found)


def _clean(value: Any) -> Any:
    """Return a JSON value without nulls, with which parquet fills what other rows have."""
    if isinstance(value, dict):
        return {k: _clean(v) for k, v in value.items() if v is not None}
    if isinstance(value, list | tuple):
        return [_clean(v) for v in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def chat_texts(documents: Iterable[dict]) -> Iterator[str]:
    """Yield the texts of documents of any shape, to train a tokenizer on."""
    for document in documents:
        if "messages" in document:
            yield from (message["content"] for message in document["messages"])
        else:
            yield from (document[key] for key in ("text", "prompt", "answer") if key in document)
