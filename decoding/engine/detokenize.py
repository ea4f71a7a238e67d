"""Detokenisation: the text of tokens that go on from others, whole or a few tokens at a time.

A part of a text is never decoded as if it were a whole one: a tokenizer may strip the first space
of a text, or cut a character in two. So tokens are decoded with those before them as context.
"""

import re
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

CONTEXT = 8  # tokens before the new ones that are decoded with them
HALF = "\ufffd"  # what stands for bytes that are no character (yet)
BYTE = re.compile("<0x([0-9A-F]{2})>")  # a byte, as SentencePiece's vocabularies write it
BYTES = {character: byte for byte, character in bytes_to_unicode().items()}  # as GPT-2's write it


def text_after(
    tokenizer: PreTrainedTokenizerBase,
    before: Sequence[int],
    ids: Sequence[int],
    skip_special_tokens: bool = True,
) -> str:
    """Return the text of tokens that go on from the tokens `before`."""
    text = Detokenizer(tokenizer, before, skip_special_tokens=skip_special_tokens)
    text.extend([*ids])
    return text.text


def token_bytes(tokenizer: PreTrainedTokenizerBase, id: int, **options) -> bytes:
    """Return the bytes that a token adds inside of a text; options are of the tokenizer's `decode`.

    >>> token_bytes(llama2, llama2.convert_tokens_to_ids("▁Paris"))
    b' Paris'
    """
    token = tokenizer.convert_ids_to_tokens(id) or ""
    if _has(tokenizer, "ByteFallback") and (byte := BYTE.fullmatch(token)):
        return bytes([int(byte[1], 16)])
    if _has(tokenizer, "ByteLevel") and all(c in BYTES for c in token):
        return bytes(BYTES[c] for c in token)
    # Its second occurrence is inside of a text, whatever is done to the beginning of one.
    once, twice = (_whole(tokenizer, [id] * n, **options) for n in (1, 2))
    return twice[len(once) :].encode()


def token_text(tokenizer: PreTrainedTokenizerBase, id: int) -> str:
    """Return a token as text; bytes that are no character by themselves are U+FFFD."""
    return token_bytes(tokenizer, id).decode(errors="replace")


class Detokenizer:
    """The text of a growing sequence, equal to that of all its tokens decoded at once.

    Only the last tokens are decoded again, because a token's text may depend on those before it (a
    character cut in two, a word's first space): n tokens cost O(n), not O(n^2). `text` may end in
    half a character (U+FFFD).

    Args:
        before: Tokens that the sequence goes on from; their text is not part of its text.
        marks: Special tokens, with what `written` has in their place.
        skip_special_tokens: Whether `text` has no special tokens.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        before: Sequence[int] = (),
        marks: dict[int, str] | None = None,
        skip_special_tokens: bool = True,
    ):
        self._tokenizer, self._marks = tokenizer, marks or {}
        self._options = {"skip_special_tokens": skip_special_tokens}
        self.text, self._done, self._count = "", "", 0
        self._found: list[tuple[int, str]] = []  # marks, at their places in `written`
        # The tokens that are decoded, and the text of those of them that are known already.
        self._window: list[int] = []
        self._head, count = "", CONTEXT
        while not self._head and len(self._window) < len(before):  # else they say nothing
            self._window = [*before[-count:]]
            self._head, count = self._decoded(self._window), 2 * count

    def __len__(self) -> int:
        """Return the number of tokens so far."""
        return self._count

    def extend(self, ids: list[int]) -> int:
        """Add tokens; return how many characters of the text before surely stay."""
        kept, start = len(self._done), 0
        for end in [i for i, token in enumerate(ids, 1) if token in self._marks]:
            self._extend(ids[start:end])
            self._found.append((len(self.written), self._marks[ids[end - 1]]))
            start = end
        self._extend(ids[start:])
        return kept

    def _extend(self, ids: list[int]) -> None:
        self._window += ids
        self._count += len(ids)
        whole = self._decoded(self._window)
        known = self._head
        if not whole.startswith(known):  # it ends in half a character, which is whole now
            known = known.rstrip(HALF)
        self.text = self._done + whole[len(known) :]
        if len(self._window) >= 2 * CONTEXT and not whole.endswith(HALF):
            head = self._decoded(self._window[-CONTEXT:])
            if head and whole.endswith(head):
                self._window, self._head = self._window[-CONTEXT:], head
                self._done = self.text

    @property
    def written(self) -> str:
        """Return the text with the special tokens of `marks`."""
        text = self.text
        for at, content in self._found:
            text = text[:at] + content + text[at:]
        return text

    def shown(self, length: int) -> int:
        """Return how many characters of `text` are among the first ones of `written`."""
        marked = (min(len(content), max(0, length - at)) for at, content in self._found)
        return length - sum(marked)

    def _decoded(self, ids: list[int]) -> str:
        """Return the text of tokens with which a text begins."""
        tokenizer, options = self._tokenizer, self._options
        text = _whole(tokenizer, ids, **options)
        if HALF not in text or not _has(tokenizer, "ByteFallback"):
            return text
        # The tokenizer makes every byte of a run U+FFFD for one that is wrong: a character that
        # was right would be none once half of the next one follows.
        parts = [token_bytes(tokenizer, i, **options) for i in ids]
        first = next((n for n, part in enumerate(parts) if part), 0)
        beginning = _whole(tokenizer, ids[: first + 1], **options).encode()
        stripped = max(0, len(parts[first]) - len(beginning))
        return b"".join(parts)[stripped:].decode(errors="replace")


def _whole(tokenizer: PreTrainedTokenizerBase, ids: list[int], **options) -> str:
    # Cleaning would take spaces out of what a model wrote.
    return tokenizer.decode(ids, clean_up_tokenization_spaces=False, **options)


def _has(tokenizer: PreTrainedTokenizerBase, kind: str) -> bool:
    """Return whether a part of the tokenizer's decoder is of a kind, such as 'ByteLevel'."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = None if backend is None else backend.decoder
    return decoder is not None and f'"type":"{kind}"'.encode() in decoder.__getstate__()
