"""Which documents are the same: their content's hash, which splits them, and ids of their own.

A file's name and a row's id are no part of it: a copy has another name, and two files may both
count their rows from 0.
"""

import hashlib
import re
import unicodedata


def content_key(document: dict) -> str:
    """Return a hash of a document's text, or of all that a chat or a pair asks.

    It is equal where only case, punctuation and white space differ, so that near-equal texts, and
    all answers to one question, are on one side of a split.
    """
    if "messages" in document:
        asked = [m["content"] for m in document["messages"] if m["role"] != "assistant"]
        return text_key("\n".join(asked or [m["content"] for m in document["messages"]]))
    if "prompt" in document and document["prompt"].strip():
        return text_key(document["prompt"])
    return text_key(document["answer"] if "answer" in document else document["text"])


def text_key(text: str) -> str:
    """Return a hash of a text's words, of its characters where it has no words."""
    words = re.sub(r"[\W_]+", " ", unicodedata.normalize("NFKC", text).casefold()).strip()
    return hashlib.sha1((words or text.strip()).encode()).hexdigest()[:16]


def distinct_id(id: str, key: str, seen: dict[int, int]) -> str:
    """Return an id, with its content's key if another content had the id before.

    >>> seen = {}
    >>> [distinct_id("7", key, seen) for key in ("a", "b", "a")]
    ['7', '7:b', '7']

    Args:
        id: As the source has it.
        key: Of the content.
        seen: The hashes of ids and of their first contents, which is updated.
    """
    return id if seen.setdefault(hash(id), hash(key)) == hash(key) else f"{id}:{key}"
