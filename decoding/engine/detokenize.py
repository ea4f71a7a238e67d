"""Incremental detokenisation: the text of a growing sequence, a few tokens at a time."""

from transformers import PreTrainedTokenizerBase

CONTEXT = 8  # tokens before the new ones that are decoded with them


class Detokenizer:
    """The text of a growing sequence, equal to that of all its tokens decoded at once.

    Only the last tokens are decoded again, because a token's text may depend on those before it (a
    character cut in two, a word's first space): n tokens cost O(n), not O(n^2). `text` may end in
    half a character (U+FFFD).
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._tokenizer, self.text = tokenizer, ""
        self._ids: list[int] = []

    def __len__(self) -> int:
        """Return the number of tokens so far."""
        return len(self._ids)

    def extend(self, ids: list[int]) -> int:
        """Add tokens; return how many characters of the text before surely stay."""
        count = CONTEXT
        while True:
            start = max(0, len(self._ids) - count)
            known = self._decode(self._ids[start:])
            # Else the window begins inside of a character: take a longer one.
            if start == 0 or self.text.endswith(known):
                break
            count *= 2
        kept = len(self.text) - len(known)
        self._ids += ids
        self.text = self.text[:kept] + self._decode(self._ids[start:])
        return kept

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)
