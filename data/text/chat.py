"""From documents to token ids with the tokens to train on: plain text, pairs and chats."""

import re

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

Messages = list[dict[str, str]]
Spans = list[tuple[int, int]]


def encode_document(
    tokenizer: PreTrainedTokenizerBase, row: dict, eos: bool = True
) -> tuple[list[int], list[bool]]:
    """`(ids, trained)` of a document in one of the shapes of `data.corpora.sources.load_documents`.

    `text`: every token is trained. `messages`: see `encode_chat`. `prompt` and `answer`: a chat of
    two turns where the tokenizer has a chat template, else the two texts in a row with only the
    answer trained. With `eos` the end-of-text token ends what is not a chat, and is trained; a
    chat ends as its template says. Raises ValueError for any other shape.
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
    if eos:
        answer = [*answer, _eos(tokenizer)]
    return prompt + answer, [False] * len(prompt) + [True] * len(answer)


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The ids of `text` as a beginning: after the start token where the model expects one."""
    return [*start_ids(tokenizer), *_ids(tokenizer, text)]


def start_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """`[bos id]` for a tokenizer that begins every text with it, else `[]`."""
    # Not all special tokens of an empty text: some tokenizers also end a text with their own.
    first = tokenizer("").input_ids[:1]
    return first if first == [tokenizer.bos_token_id] else []


def encode_prompt(tokenizer: PreTrainedTokenizerBase, messages: Messages) -> list[int]:
    """The ids of a chat up to and with the header of the assistant's next turn.

    Raises ValueError like `encode_chat`.
    """
    _check_chat(tokenizer, messages)
    return _ids(tokenizer, _render(tokenizer, messages, add_generation_prompt=True))


def encode_chat(
    tokenizer: PreTrainedTokenizerBase, messages: Messages
) -> tuple[list[int], list[bool]]:
    """`(ids, trained)` of a chat: its template's text, trained on what the assistant says.

    The end-of-turn token after an assistant's message is trained too; headers and all other turns
    are not. A template with `{% generation %}` says itself what the assistant's part is. For
    others it is found by rendering longer and longer beginnings of the chat. A message of the
    assistant that opens the chat answers nothing, so it is context.

    An answer that the template renders otherwise once more turns follow is context, too.

    Raises ValueError without a chat template, without messages, when the template refuses the
    messages, and when it renders no answer as it is asked for.
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
    """The rendered chat and the `(start, stop)` characters of it to train on."""
    if re.search(r"\{%[-+]?\s*generation\b", tokenizer.get_chat_template()):
        return _render_with_spans(tokenizer, messages)
    text = _render(tokenizer, messages)
    spans = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant" or index == 0:
            continue
        header = _render(tokenizer, messages[:index], add_generation_prompt=True)
        turn = _render(tokenizer, messages[: index + 1])
        # A model never says an earlier answer in the form that it has later in the chat (Qwen3
        # drops its thoughts), so such a turn is context, not a target.
        if text.startswith(turn) and turn.startswith(header):
            # White space after the end-of-turn token is the template's, not the assistant's.
            spans.append((len(header), len(turn.rstrip())))
    if not spans and any(m["role"] == "assistant" for m in messages[1:]):
        raise ValueError(
            f"The chat template of {tokenizer.name_or_path!r} renders every answer otherwise than "
            "it is asked for, so no answer's tokens can be told apart. Use a template with "
            "{% generation %} blocks."
        )
    return text, spans


def _render(tokenizer: PreTrainedTokenizerBase, messages: Messages, **options) -> str:
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, **options)
    except (TemplateError, TypeError) as error:
        raise _refused(tokenizer, error) from error


def _render_with_spans(tokenizer: PreTrainedTokenizerBase, messages: Messages) -> tuple[str, Spans]:
    # apply_chat_template(return_assistant_tokens_mask=True) goes wrong where the tokenizer trims
    # spaces from its offsets: a span that begins with a space is lost with all later ones, and one
    # that ends with a space runs to the end of the chat. So take the spans in characters, and find
    # their tokens ourselves.
    try:
        [text], [spans] = render_jinja_template(
            conversations=[messages],
            chat_template=tokenizer.get_chat_template(),
            return_assistant_tokens_mask=True,
            **tokenizer.special_tokens_map,
        )
    except (TemplateError, TypeError) as error:
        raise _refused(tokenizer, error) from error
    return text, spans


def _refused(tokenizer: PreTrainedTokenizerBase, error: Exception) -> ValueError:
    return ValueError(f"The chat template of {tokenizer.name_or_path!r} refused a chat: {error}")


def _tokens_before(tokenizer: PreTrainedTokenizerBase, ids: list[int], beginning: str) -> int:
    """How many of `ids` come from `beginning` alone; a token across its end does not count."""
    prefix = _ids(tokenizer, beginning)
    pairs = enumerate(zip(prefix, ids, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(prefix), len(ids)))


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False).input_ids


def _eos(tokenizer: PreTrainedTokenizerBase) -> int:
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"The tokenizer {tokenizer.name_or_path!r} has no end-of-text token. "
            "Set tokenizer.eos_token, or encode with eos=False."
        )
    return tokenizer.eos_token_id
