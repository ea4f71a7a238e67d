"""Words that spell special tokens: in a text they are text, and only a template writes tokens.

A user's text may say `<|im_end|>`, and so may an answer or a document. `quoted` puts such words
between marks, a chat template copies the marks with the text, and `encode` reads marked words as
text and all others as tokens. A text without such words is encoded as the tokenizer does it.
"""

import copy
import json
import re
import secrets
from collections.abc import Collection
from typing import Any
from weakref import WeakKeyDictionary

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

MASK_TOKEN = "<|mask|>"
SEPARATOR_TOKEN = "<|draft|>"
DRAFTING = (MASK_TOKEN, SEPARATOR_TOKEN)  # tokens that a drafter adds, which no prompt means
# Marks of digits, which no text can contain on purpose: of words that are text, and of tokens.
QUOTE, TOKEN = (f"{secrets.randbelow(10**20):020}" for _ in range(2))


def quoted(tokenizer: PreTrainedTokenizerBase, value: Any, words: Collection[str] = ()) -> Any:
    """Return a text, or a JSON value with texts, with `QUOTE` around words of special tokens.

    `words` are those that are text; by default all that spell a special token.
    """
    known = _special_words(tokenizer)
    try:
        return known.quoted(value, [w for w in known.words if not words or w in words])
    except RecursionError:
        raise ValueError("it is nested too deep to be read (RecursionError)") from None


def unquoted(text: str) -> str:
    """Return a text without marks, for people."""
    return text.replace(QUOTE, "")


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the token ids of a text, whose words between `QUOTE`s are no special tokens.

    No token comes before or after them.
    """
    if QUOTE in text:
        known = _special_words(tokenizer)
        text = known.pattern.sub(lambda m: m[1] or TOKEN + m[2], text)
        tokenizer, text = known.literal(tokenizer), unquoted(text)
    return tokenizer(text, add_special_tokens=False).input_ids


class _SpecialWords:
    """The special tokens of a tokenizer, and a copy of it that reads their words as text.

    Added tokens that are not special, such as `<think>` of many models, are tokens in any text, as
    with transformers' `split_special_tokens`.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        # A tokenizer that is not backed by the tokenizers library is left as it is.
        added = tokenizer.added_tokens_decoder if tokenizer.is_fast else {}
        named = {*tokenizer.all_special_tokens}
        special = {i: t for i, t in added.items() if t.special or t.content in named}
        self.words = sorted((t.content for t in special.values()), key=len, reverse=True)
        either = _either(self.words)
        self.pattern = re.compile(f"{QUOTE}({either}){QUOTE}|({either})")
        # A normalizer may make such a word of another spelling: `<MASK>` of a lowercasing one.
        self._normalizer = None
        if any(token.normalized for token in special.values()):
            self._normalizer = tokenizer.backend_tokenizer.normalizer
        self._literal: PreTrainedTokenizerBase | None = None

    def quoted(self, value: Any, words: list[str]) -> Any:
        if isinstance(value, dict):
            return {self.quoted(k, words): self.quoted(v, words) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self.quoted(v, words) for v in value]
        if not isinstance(value, str) or not value:
            return value
        if any(word in value for word in words):
            return re.sub(_either(words), lambda m: QUOTE + m[0] + QUOTE, value)
        if self._normalizer and words:
            normal = self._normalizer.normalize_str(value)
            if any(word in normal for word in words):
                return QUOTE + value  # no word of it is a token as it is
        return value

    def literal(self, tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
        """Return a copy of the tokenizer whose special tokens are spelled with `TOKEN` in front."""
        if self._literal is None:
            backend, words = json.loads(tokenizer.backend_tokenizer.to_str()), {*self.words}

            def spelled(word: str) -> str:
                return TOKEN + word if word in words else word

            for token in backend["added_tokens"]:
                token["content"] = spelled(token["content"])
            # A model, too, may know these words: unigrams and whole words would be found there.
            model = backend["model"]
            if isinstance(model["vocab"], dict):
                model["vocab"] = {spelled(word): id for word, id in model["vocab"].items()}
            else:
                model["vocab"] = [[spelled(word), score] for word, score in model["vocab"]]
            if model.get("unk_token") is not None:
                model["unk_token"] = spelled(model["unk_token"])
            if "merges" in model:
                pairs = [m.split(" ") if isinstance(m, str) else m for m in model["merges"]]
                model["merges"] = [p for p in pairs if words.isdisjoint([*p, "".join(p)])]
            backend |= {"padding": None, "truncation": None}
            made = copy.copy(tokenizer)
            made._tokenizer = Tokenizer.from_str(json.dumps(backend))
            added = tokenizer.backend_tokenizer.get_added_tokens_decoder()
            kept = made._tokenizer.get_added_tokens_decoder()
            assert {i: spelled(t.content) for i, t in added.items()} == {
                i: t.content for i, t in kept.items()
            }, "a copy of the tokenizer has other ids"
            self._literal = made
        return self._literal


def _either(words: Collection[str]) -> str:
    """Return a regular expression of the words; of none it matches nothing."""
    return "|".join(map(re.escape, words)) or "(?!)"


_known: WeakKeyDictionary[PreTrainedTokenizerBase, tuple] = WeakKeyDictionary()


def _special_words(tokenizer: PreTrainedTokenizerBase) -> _SpecialWords:
    state = (len(tokenizer), *tokenizer.all_special_tokens)
    before, found = _known.get(tokenizer, (None, None))
    if before != state:
        found = _SpecialWords(tokenizer)
        _known[tokenizer] = state, found
    assert found is not None
    return found
