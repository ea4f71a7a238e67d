"""Encoding of documents (texts, prompt-answer pairs, chats): token ids and a training mask."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from inspect import signature
from itertools import takewhile
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from data.text.rendering import Spans, render
from data.text.special import DRAFTING, encode, quoted, unquoted

Messages = list[dict[str, Any]]
Encoded = tuple[list[int], list[bool]]
ANSWER = "Twelve"  # of an example of a chat
# What a turn says beside its text, and a template must read; a thought has three names.
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
NEEDED = (*THOUGHTS, "tool_calls", "tools")
# Arguments of a rendering that are ours, and the names of special tokens, which templates read.
RESERVED = {*signature(render_jinja_template).parameters, "messages", "template", "seconds"}
RESERVED |= {*PreTrainedTokenizerBase.SPECIAL_TOKENS_ATTRIBUTES, "additional_special_tokens"}
RESERVED |= {"rendered_on"}
RESERVED -= {"tools"}


@contextmanager
def located(row: dict) -> Iterator[None]:
    """Begin errors about a document in the context with its file and row, or else with its id."""
    try:
        yield
    except ValueError as error:
        where = getattr(row, "where", None) or row.get("where") or row.get("id")
        raise ValueError(f"{where}: {error}" if where else str(error)) from error


def encode_document(tokenizer: PreTrainedTokenizerBase, row: dict) -> tuple[list[int], list[bool]]:
    """Return token ids and training mask of one document of `data.corpora.sources.load_documents`.

    All tokens of a `text` are trained. For `messages` see `encode_chat`. `prompt` and `answer` are
    a chat of two turns if the tokenizer has a chat template, else joined texts of which only the
    answer is trained. They end with a trained end-of-text token; a chat's template ends it. An
    empty text or answer is not trained: its end alone teaches to say nothing. Words that spell
    special tokens are text.
    """
    return encode_documents(tokenizer, row)[0]


def encode_documents(tokenizer: PreTrainedTokenizerBase, row: dict) -> list[Encoded]:
    """Return the sequences of one document, as `encode_document`: of a chat they may be several.

    A template may render an answer otherwise once more turns follow (Qwen3's drops its thought).
    The model generates the form that was last, so that form is a sequence of its own, and trained.
    An answer whose tokens cannot be told from its prompt's is a sequence of which nothing is.
    """
    with located(row):
        return _encode_document(tokenizer, row)


def _encode_document(tokenizer: PreTrainedTokenizerBase, row: dict) -> list[Encoded]:
    if "messages" in row:
        return _encode_chat(tokenizer, *chat_of(tokenizer, row))
    row = quoted(tokenizer, row)
    if "text" in row:
        prompt, answer, said = [], encode_text(tokenizer, row["text"]), row["text"]
    elif "prompt" in row and "answer" in row:
        if tokenizer.chat_template:
            turns = [("user", row["prompt"]), ("assistant", row["answer"])]
            return _encode_chat(tokenizer, [{"role": r, "content": c} for r, c in turns])
        prompt, answer = encode_text(tokenizer, row["prompt"]), encode(tokenizer, row["answer"])
        said = row["answer"]
    else:
        raise ValueError(
            f"Cannot encode a document with the keys {sorted(row)}. "
            "Choose from 'text', 'messages', or 'prompt' and 'answer'."
        )
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"The tokenizer {tokenizer.name_or_path!r} has no end-of-text token. "
            "Set tokenizer.eos_token."
        )
    answer = [*answer, tokenizer.eos_token_id]
    return [(prompt + answer, [False] * len(prompt) + [bool(said)] * len(answer))]


def chat_of(tokenizer: PreTrainedTokenizerBase, row: dict) -> tuple[Messages, dict]:
    """Return a document's messages and its arguments of the chat template.

    Raises:
        ValueError: For thoughts, calls or tools that the tokenizer's template would leave out.
    """
    options = row.get("options", {})
    if reserved := {*options} & RESERVED:
        raise ValueError(
            f"chat_template_kwargs has {sorted(reserved)[0]!r}, which is not the row's"
        )
    template = _template(tokenizer, options) if tokenizer.chat_template else ""
    messages = [thought_renamed(message, template) for message in row["messages"]]
    for key in (key for said in (*messages, options) for key in NEEDED if key in said):
        if template and key not in template:
            raise ValueError(
                f"the chat template of {tokenizer.name_or_path!r} does not read {key!r}, so it "
                "would be lost: give a tokenizer whose template does, or rows without it"
            )
    return messages, options


def thought_renamed(message: dict, template: str) -> dict:
    """Return a turn whose thought has the name that the template reads."""
    name = next((name for name in THOUGHTS if name in message), None)
    read = next((other for other in (name, *THOUGHTS) if other and other in template), None)
    if name is None or read in (None, name):
        return message
    return {key: x for key, x in message.items() if key != name} | {read: message[name]}


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the token ids of a text that goes on: the ids of a prompt, in every command.

    The start token (BOS) comes before it if the model expects one and the text has none. No end
    token follows it, also where the tokenizer ends every text with one. Words of special tokens are
    these tokens, as in other engines, unless they are those that drafters add, or `quoted`.
    """
    ids = encode(tokenizer, quoted(tokenizer, text, DRAFTING))
    start = start_ids(tokenizer)
    return ids if ids[: len(start)] == start else start + ids


def start_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens that the tokenizer puts before every text: `[bos id]`, mostly, or `[]`."""
    whole, text = tokenizer("a").input_ids, encode(tokenizer, "a")
    starts = range(len(whole) - len(text) + 1)
    return whole[: next((n for n in starts if whole[n : n + len(text)] == text), 0)]


def text_ends(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens with which a text or an answer ends by the tokenizer and its chat template.

    They are its end token, and the token with which the template ends an assistant's turn.
    """
    known = tokenizer.eos_token_id
    found = {} if known is None else {known: None}
    return [*found | dict.fromkeys(_end_of_turn(tokenizer))]


def _end_of_turn(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the added token after an answer in the chat template, `[]` if there is none."""
    if not tokenizer.chat_template:
        return []
    try:
        text = _example(tokenizer.get_chat_template(), json.dumps(tokenizer.special_tokens_map))
    except ValueError:  # the template takes no such chat
        return []
    _, answer, end = text.rpartition(ANSWER)
    ids, added = encode(tokenizer, end), tokenizer.added_tokens_decoder
    return [id for id in ids if answer and id in added][:1]


@cache
def _example(template: str, special_tokens: str) -> str:
    """Render a chat of two turns; rendering starts a process, and a tokenizer is loaded often."""
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": ANSWER}]
    return render(template, turns, **json.loads(special_tokens))[0]


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, options: dict | None = None
) -> list[int]:
    """Return the token ids of a chat prompt, including the header of the assistant's next turn."""
    return encode(tokenizer, render_prompt(tokenizer, messages, options))


def question_start(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens with which the chat template begins a user's turn, before any word.

    Raises:
        ValueError: Without a chat template, or one that writes nothing there.
    """
    asked = [encode_prompt(tokenizer, [{"role": "user", "content": c}]) for c in ("Why", "12")]
    start = [first for first, _ in takewhile(lambda pair: len({*pair}) == 1, zip(*asked))]
    if not start:
        raise ValueError(
            f"the chat template of {tokenizer.name_or_path!r} writes nothing before a user's words"
        )
    return start


def render_prompt(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, options: dict | None = None
) -> str:
    """Return the text of a chat prompt, whose special tokens it has already, for `encode`.

    `options` are what the template itself reads, such as Qwen3's `enable_thinking`.
    """
    _check_chat(tokenizer, messages)
    return render_chat(tokenizer, messages, **{**(options or {}), "add_generation_prompt": True})


def render_chat(tokenizer: PreTrainedTokenizerBase, messages: Messages, **options) -> str:
    """Return a chat's text for `encode`, with options as of the tokenizer's `apply_chat_template`.

    Words of the messages that spell special tokens are `quoted`: the template's own are tokens.
    """
    return _render(tokenizer, messages, **options)[0]


def encode_chat(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, options: dict | None = None
) -> Encoded:
    """Return token ids and training mask of a chat, rendered by the tokenizer's chat template.

    The assistant's messages are trained, each with its end-of-turn token; headers and other turns
    are not. `{% generation %}` blocks of the template mark these tokens; without such blocks,
    rendering each prefix of the chat finds them. Not trained are messages with `train` False or
    without any content, one that opens the chat, and one that the template renders differently once
    more turns follow (see `encode_documents`).

    Args:
        tokenizer: Has a chat template.
        messages: Turns `{"role": ..., "content": ...}`.
        options: Arguments of the chat template, such as `tools`.

    Raises:
        ValueError: Without a chat template or messages, if the template rejects the messages, or
            if it renders no answer as a continuation of its prompt.
    """
    return _encode_chat(tokenizer, messages, options)[0]


def _encode_chat(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, options: dict | None = None
) -> list[Encoded]:
    _check_chat(tokenizer, messages)
    found = []
    for text, spans in _renderings(tokenizer, messages, options or {}):
        ids = encode(tokenizer, text)
        trained = [False] * len(ids)
        for start, stop in spans:
            first, last = (_tokens_before(tokenizer, ids, text[:cut]) for cut in (start, stop))
            trained[first:last] = [True] * (last - first)
        found.append((ids, trained))
    return found


def _check_chat(tokenizer: PreTrainedTokenizerBase, messages: Messages) -> None:
    if not tokenizer.chat_template:
        raise ValueError(
            f"The tokenizer {tokenizer.name_or_path!r} has no chat template, but the data are "
            "chats. Use the tokenizer of a chat model, or set tokenizer.chat_template."
        )
    if not messages:
        raise ValueError("Cannot encode a chat without messages.")


def _is_trained(message: dict) -> bool:
    """Return whether a message is an assistant's that says something and is to be trained."""
    says = any(message.get(key) for key in ("content", "tool_calls", *THOUGHTS))
    return message["role"] == "assistant" and says and message.get("train") is not False


def _renderings(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, options: dict
) -> list[tuple[str, Spans]]:
    """Return the chat's texts with their trained character spans `(start, stop)`.

    The whole chat is first, unless only others are trained. Each answer is trained in the longest
    text that has it, and all before it, as they were rendered when it was the last.
    """
    text, answers = _answers(tokenizer, messages, options)
    found, lost = [(text, Spans())], []
    for turn, span in answers:
        if span is None:
            lost.append((turn, Spans()))
            continue
        home = next((spans for whole, spans in found if whole.startswith(turn)), None)
        if home is None:
            found.append((turn, home := Spans()))
        home.insert(0, span)
    if lost and not any(spans for _, spans in found):
        raise ValueError(
            f"The chat template of {tokenizer.name_or_path!r} renders no answer as a "
            "continuation of its prompt, so the tokens of the answers cannot be found. Use a "
            "template with {% generation %} blocks."
        )
    if not found[0][1] and len(found) > 1:
        del found[0]
    return found + lost


def _answers(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, options: dict
) -> tuple[str, list[tuple[str, tuple[int, int] | None]]]:
    """Return the chat's text, and of each trained answer, the last first, its text and its span.

    The text is the chat up to the answer's end; the span is None where the tokens of an answer
    cannot be told from its prompt's.
    """
    found: list[tuple[str, tuple[int, int] | None]] = []
    if re.search(r"\{%[-+]?\s*generation\b", _template(tokenizer, options)):
        # apply_chat_template(return_assistant_tokens_mask=True) is wrong if the tokenizer trims
        # spaces from its offsets: a span that begins with a space is lost with all later ones, and
        # one that ends with a space runs to the end of the chat. So we take the spans in
        # characters, and find their tokens in `_tokens_before`.
        mask = {"return_assistant_tokens_mask": True}
        text, spans = _render(tokenizer, messages, **options, **mask)
        said = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        if len(spans) != len(said):
            if all(_is_trained(messages[i]) for i in said):
                return text, [(text[: span[1]], span) for span in reversed(spans)]
            raise ValueError(
                f"The chat template of {tokenizer.name_or_path!r} marks {len(spans)} parts of "
                f"{len(said)} answers, so those that are not trained cannot be told apart. Leave "
                "out the chats in which an answer is empty or has a weight of 0."
            )
        for index in filter(lambda i: _is_trained(messages[i]), reversed(said)):
            turn, own = text, spans
            if index + 1 < len(messages):  # a later turn may have changed it
                turn, own = _render(tokenizer, messages[: index + 1], **options, **mask)
            found.append((turn[: own[-1][1]], own[-1]) if own else (turn, None))
        return text, found
    text = render_chat(tokenizer, messages, **options)
    for index in reversed(range(1, len(messages))):
        if not _is_trained(messages[index]):
            continue
        prompt = {**options, "add_generation_prompt": True}
        header = render_chat(tokenizer, messages[:index], **prompt)
        turn = render_chat(tokenizer, messages[: index + 1], **options)
        # White space after the end-of-turn token is the template's, not the assistant's.
        span = (len(header), len(turn.rstrip())) if turn.startswith(header) else None
        found.append((turn, span))
    return text, found


def reads_clock(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the chat template may write the date."""
    return "strftime_now" in json.dumps(tokenizer.chat_template)


def _template(tokenizer: PreTrainedTokenizerBase, options: dict) -> str:
    """Return the tokenizer's chat template; some have one of their own for tools."""
    return tokenizer.get_chat_template(tools=options.get("tools"))


def _render(tokenizer: PreTrainedTokenizerBase, messages: Messages, **options) -> tuple[str, Spans]:
    given = [
        {k: v for k, v in message.items() if v is not None and k != "train"} for message in messages
    ]
    template = _template(tokenizer, options)
    given, options = quoted(tokenizer, given), quoted(tokenizer, options)
    try:
        return render(template, given, **{**tokenizer.special_tokens_map, **options})
    except ValueError as error:
        said = f"The chat template of {tokenizer.name_or_path!r} rejected a chat: {error}"
        raise ValueError(unquoted(said)) from error


def _tokens_before(tokenizer: PreTrainedTokenizerBase, ids: list[int], beginning: str) -> int:
    """Return how many leading `ids` lie inside `beginning`; a token across its end does not."""
    prefix = encode(tokenizer, beginning)
    pairs = enumerate(zip(prefix, ids, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(prefix), len(ids)))
