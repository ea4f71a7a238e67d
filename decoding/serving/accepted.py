"""The parts of an answer's text that are accepted drafts."""

from collections.abc import Sequence
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from decoding.engine.detokenize import HALF, Detokenizer
from decoding.engine.params import Chunk, Stats


class Accepted(NamedTuple):
    """The accepted drafts of one chunk.

    Attributes:
        parts: [start, end] of each part of its text, in characters.
        counts: Accepted drafts of each of its passes.
    """

    parts: list[list[int]]
    counts: list[int]


class AcceptedText:
    """Finds the accepted drafts in one answer's text, chunk by chunk.

    The last token of a pass is the target's own (the bonus token, or a correction), all before it
    are accepted drafts. A character spelled by several tokens counts as the last one's. The answer
    goes on from the tokens of `prompt`.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int] = ()):
        self._text = Detokenizer(tokenizer, prompt)
        self._new: list[int] = []  # tokens that the text lacks still
        self._passes = self._shown = 0  # passes and characters of the chunks so far
        # [start, end] in the whole text: a chunk's text may lag behind its tokens.
        self._found: list[list[int]] = []

    def of(self, chunk: Chunk, stats: Stats) -> Accepted:
        """Return the accepted drafts of the next chunk.

        The answer's stats may already include further passes.
        """
        ids, counts = chunk.token_ids, []
        while ids:
            size = stats.emitted[self._passes]
            self._passes += 1
            # Where the answer's end has cut the last pass, its own token is not there.
            cut = size == len(ids) and chunk.result is not None and stats.beyond > 0
            drafts = size if cut else size - 1
            counts.append(drafts)
            if drafts:
                start = self._length(self._new)
                self._found.append([start, self._length(ids[:drafts])])
                self._new = []
            self._new += ids[drafts:size]
            ids = ids[size:]
        begin, self._shown = self._shown, self._shown + len(chunk.text)
        parts = [[max(a, begin) - begin, min(b, self._shown) - begin] for a, b in self._found]
        self._found = [part for part in self._found if part[1] > self._shown]
        return Accepted([[a, b] for a, b in parts if a < b], counts)

    def _length(self, ids: list[int]) -> int:
        """Return how many whole characters these tokens' text has."""
        self._text.extend(ids)
        return len(self._text.text.rstrip(HALF))
