"""Prompt sets for benches, validation and collection: deterministic, the same on every machine."""

import hashlib
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from data.corpora.sources import load_documents, read_jsonl, row_id
from data.text.chat import encode_prompt, encode_text, start_ids


def heldout_prompts(
    source: str,
    tokenizer: PreTrainedTokenizerBase,
    count: int,
    length: int,
    *,
    split: str = "heldout",
    **options,
) -> list[dict]:
    """A deterministic set of prompts from a corpus or a prompt file.

    A prompt is, of a text, a window of exactly `length` tokens (windows do not overlap, their
    offsets are a hash of the document's id, and they come from as many documents as possible); of
    a chat or a prompt-answer pair, everything before the first answer, cut to its last `length`
    tokens.

    A .jsonl file whose rows have `turns` (MT-Bench, Spec-Bench: the first turn is used, as a chat
    if the tokenizer has a template) or `prompt` without an answer (HumanEval: used verbatim) is a
    prompt file, which has no splits. A .jsonl file with `text` has splits, and each text is one
    prompt.

    Args:
        source: a corpus as in `data.corpora.sources.load_documents`, or a prompt file.
        tokenizer: encodes the prompts.
        count: number of prompts.
        length: tokens per prompt: exactly (windows) or at most (whole prompts).
        split: 'heldout' or 'train'; ignored for a prompt file.
        **options: further arguments of `data.corpora.sources.load_documents`.

    Returns:
        `count` prompts `{"id": str, "prompt_ids": list[int], "text": str}`.

    Raises:
        ValueError: as `load_documents` does, and if the source has fewer than `count` prompts.
    """
    for name, value in (("count", count), ("length", length)):
        if value < 1:
            raise ValueError(f"{name}={value} makes no prompt set. Choose at least 1.")
    path = Path(source).expanduser()
    if path.suffix == ".jsonl" and path.is_file() and _is_prompt_file(path):
        found = _whole_prompts(_prompt_rows(path), tokenizer, length)
    else:
        documents = _shuffled(load_documents(source, split, **options))
        if path.suffix != ".jsonl" and "text" in documents[0]:
            found = _windows(documents, tokenizer, length)
        else:
            found = _whole_prompts(documents, tokenizer, length)
    prompts = [
        {"id": id, "prompt_ids": ids, "text": tokenizer.decode(ids)}
        for id, ids in islice(found, count)
    ]
    if len(prompts) < count:
        raise ValueError(
            f"source={source!r} has {len(prompts)} prompts of length={length} in split={split!r}, "
            f"but count={count}. Lower count or length, or give a larger source."
        )
    return prompts


def _is_prompt_file(path: Path) -> bool:
    row = next((row for _, row in read_jsonl(path)), {})
    return "turns" in row or ("prompt" in row and not _has_answer(row))


def _has_answer(row: dict) -> bool:
    return any(column in row for column in ("answer", "response", "completion", "messages"))


def _prompt_rows(path: Path) -> list[dict]:
    """The rows of a prompt file as documents: a first turn becomes a chat, a prompt a text."""
    documents = []
    for line, row in read_jsonl(path):
        id = row_id(row, f"{path.name}:{line}")
        if isinstance(row.get("turns"), list) and row["turns"]:
            documents.append({"id": id, "prompt": row["turns"][0]})
        elif isinstance(row.get("prompt"), str):
            documents.append({"id": id, "text": row["prompt"]})
        else:
            raise ValueError(
                f"{path}, line {line}: no 'turns' and no 'prompt', but {sorted(row)}. "
                "Each row of a prompt file needs one of the two."
            )
    return _shuffled(documents)


def _whole_prompts(
    documents: Iterable[dict], tokenizer: PreTrainedTokenizerBase, length: int
) -> Iterator[tuple[str, list[int]]]:
    for document in documents:
        ids = _prompt_ids(document, tokenizer)[-length:]
        if ids:
            yield document["id"], ids


def _prompt_ids(document: dict, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    if "text" in document:
        return encode_text(tokenizer, document["text"])
    if "messages" in document:
        return encode_prompt(tokenizer, _before_answer(document["messages"]))
    if tokenizer.chat_template:
        return encode_prompt(tokenizer, [{"role": "user", "content": document["prompt"]}])
    return encode_text(tokenizer, document["prompt"])


def _before_answer(messages: list[dict[str, str]]) -> list[dict[str, str]]:
    roles = [message["role"] for message in messages]
    # If the assistant opens the chat, the first answer is the one after the first user turn.
    asked = roles.index("user") if "user" in roles else 0
    answered = roles.index("assistant", asked) if "assistant" in roles[asked:] else len(roles)
    return messages[:answered]


def _windows(
    documents: list[dict], tokenizer: PreTrainedTokenizerBase, length: int
) -> Iterator[tuple[str, list[int]]]:
    """Windows in rounds: the first window of each document, then the second of each, and so on."""
    # Generators, so that a document is tokenized only when its first window is needed.
    windows = [_document_windows(document, tokenizer, length) for document in documents]
    while windows:
        remaining = []
        for document_windows in windows:
            window = next(document_windows, None)
            if window is not None:
                yield window
                remaining.append(document_windows)
        windows = remaining


def _document_windows(
    document: dict, tokenizer: PreTrainedTokenizerBase, length: int
) -> Iterator[tuple[str, list[int]]]:
    """The disjoint windows of a document; their order and offset are a hash of its id."""
    id, start = document["id"], start_ids(tokenizer)
    width = length - len(start)
    if width < 1:
        return
    ids = tokenizer(document["text"], add_special_tokens=False).input_ids
    slots = len(ids) // width
    shift = _hash(id) % (len(ids) - slots * width + 1)
    for slot in sorted(range(slots), key=lambda slot: _hash(f"{id}:{slot}")):
        offset = shift + slot * width
        yield f"{id}@{offset}", start + ids[offset : offset + width]


def _shuffled(documents: Iterable[dict]) -> list[dict]:
    """The documents sorted by a hash of their ids: any first few are then a fair sample."""
    return sorted(documents, key=lambda document: _hash(document["id"]))


def _hash(text: str) -> int:
    return int(hashlib.sha1(text.encode()).hexdigest(), 16)
