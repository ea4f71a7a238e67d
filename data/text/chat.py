"""Encoding of documents (texts, prompt-answer pairs, chats): token ids and a training mask."""

import re

from transformers import PreTrainedTokenizerBase

from data.text.rendering import Spans, render

Messages = list[dict[str, str]]


def encode_document(tokenizer: PreTrainedTokenizerBase, row: dict) -> tuple[list[int], list[bool]]:
    """Return token ids and training mask of one document of `data.corpora.sources.load_documents`.

    All tokens of a `text` are trained. For `messages` see `encode_chat`. `prompt` and `answer` are
    a chat of two turns if the tokenizer has a chat template, else joined texts of which only the
    answer is trained. They end with a trained end-of-text token; a chat's template ends it.
    """
    if "messages" in row:
        return encode_chat(tokenizer, row["messages"])
    if "text" in row:
        prompt, answer = [], encode_text(tokenizer, row["text"])
    elif "prompt" in row and "answer" in row:
        if tokenizer.chat_template:
            turns = [("user", row["prompt"]), ("assistant", row["answer"])]
            return encode_chat(tokenizer, [{"role": r, "content": c} for r, c in turns])
        prompt, answer = encode_text(tokenizer, row["prompt"]), _ids(tokenizer, row["answer"])
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
    return prompt + answer, [False] * len(prompt) + [True] * len(answer)


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the token ids of `text`, after the start token (BOS) if the model expects one."""
    return [*start_ids(tokenizer), *_ids(tokenizer, text)]


def start_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return `[bos id]` if the tokenizer puts it before every text, else `[]`."""
    # Not all special tokens of an empty text: some tokenizers also end a text with their own.
    first = tokenizer("").input_ids[:1]
    return first if first == [tokenizer.bos_token_id] else []


def encode_prompt(tokenizer: PreTrainedTokenizerBase, messages: Messages) -> list[int]:
    """Return the token ids of a chat prompt, including the header of the assistant's next turn."""
    return _ids(tokenizer, render_prompt(tokenizer, messages))


def render_prompt(tokenizer: PreTrainedTokenizerBase, messages: Messages, **options) -> str:
    """Return the text of a chat prompt, whose special tokens it has already.

    `options` are what the template itself reads, such as Qwen3's `enable_thinking`.
    """
    _check_chat(tokenizer, messages)
    return render_chat(tokenizer, messages, add_generation_prompt=True, **options)


def render_chat(tokenizer: PreTrainedTokenizerBase, messages: Messages, **options) -> str:
    """Return a chat's text, with options as of the tokenizer's `apply_chat_template`."""
    return _render(tokenizer, messages, **options)[0]


def encode_chat(
    tokenizer: PreTrainedTokenizerBase, messages: Messages
) -> tuple[list[int], list[bool]]:
    """Return token ids and training mask of a chat, rendered by the tokenizer's chat template.

    The assistant's messages are trained, each with its end-of-turn token; headers and other turns
    are not. `{% generation %}` blocks of the template mark these tokens; without such blocks,
    rendering each prefix of the chat finds them. Two kinds of messages are not trained: one that
    opens the chat, and one that the template renders differently once more turns follow.

    Args:
        tokenizer: Has a chat template.
        messages: Turns `{"role": ..., "content": ...}`.

    Raises:
        ValueError: Without a chat template or messages, if the template rejects the messages, or
            if it renders no answer as a continuation of its prompt.
    """
    _check_chat(tokenizer, messages)
    text, spans = _assistant_spans(tokenizer, messages)
    ids = _ids(tokenizer, text)
    trained = [False] * len(ids)
    for start, stop in spans:
        first, last = (_tokens_before(tokenizer, ids, text[:cut]) for cut in (start, stop))
        trained[first:last] = [True] * (last - first)
    return ids, trained


def _check_chat(tokenizer: PreTrainedTokenizerBase, messages: Messages) -> None:
    if not tokenizer.chat_template:
        raise ValueError(
            f"The tokenizer {tokenizer.name_or_path!r} has no chat template, but the data are "
            "chats. Use the tokenizer of a chat model, or set tokenizer.chat_template."
        )
    if not messages:
        raise ValueError("Cannot encode a chat without messages.")


def _assistant_spans(tokenizer: PreTrainedTokenizerBase, messages: Messages) -> tuple[str, Spans]:
    """Return the rendered chat and its trained character spans `(start, stop)`."""
    if re.search(r"\{%[-+]?\s*generation\b", tokenizer.get_chat_template()):
        # apply_chat_template(return_assistant_tokens_mask=True) is wrong if the tokenizer trims
        # spaces from its offsets: a span that begins with a space is lost with all later ones, and
        # one that ends with a space runs to the end of the chat. So we take the spans in
        # characters, and find their tokens in `_tokens_before`.
        return _render(tokenizer, messages, return_assistant_tokens_mask=True)
    text = render_chat(tokenizer, messages)
    spans = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant" or index == 0:
            continue
        header = render_chat(tokenizer, messages[:index], add_generation_prompt=True)
        turn = render_chat(tokenizer, messages[: index + 1])
        # A template may rewrite earlier answers once more turns follow (Qwen3's drops their
        # thoughts). The model never generates that form, so such a turn is no target.
        if text.startswith(turn) and turn.startswith(header):
            # White space after the end-of-turn token is the template's, not the assistant's.
            spans.append((len(header), len(turn.rstrip())))
    if not spans and any(m["role"] == "assistant" for m in messages[1:]):
        raise ValueError(
            f"The chat template of {tokenizer.name_or_path!r} renders no answer as a "
            "continuation of its prompt, so the tokens of the answers cannot be found. Use a "
            "template with {% generation %} blocks."
        )
    return text, spans


def _render(tokenizer: PreTrainedTokenizerBase, messages: Messages, **options) -> tuple[str, Spans]:
    given = [{k: v for k, v in message.items() if v is not None} for message in messages]
    options = {**tokenizer.special_tokens_map, **options}
    try:
        return render(tokenizer.get_chat_template(), given, **options)
    except ValueError as error:
        name = tokenizer.name_or_path
        raise ValueError(f"The chat template of {name!r} rejected a chat: {error}") from error


def _tokens_before(tokenizer: PreTrainedTokenizerBase, ids: list[int], beginning: str) -> int:
    """Return how many leading `ids` lie inside `beginning`; a token across its end does not."""
    prefix = _ids(tokenizer, beginning)
    pairs = enumerate(zip(prefix, ids, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(prefix), len(ids)))


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False).input_ids
