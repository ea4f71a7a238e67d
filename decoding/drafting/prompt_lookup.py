"""Prompt lookup: a text's own n-grams as proposals for its next token.

Texts repeat themselves, code most of all; transformers' prompt lookup decoding drafts from that
alone. Here it is one component of the mixture that ranks a draft tree:

    p(v | text, path) = (1 - a_n) p(v | drafter) + a_n c_n(v) / sum c_n

n is the length of the longest suffix (at most ORDER tokens) that occurred before, c_n counts the
tokens that followed it, and a_n is the share of tokens that were among such tokens, in this text
and, as if TRUST guesses of it had been checked, in usual ones. After the drafter's last position
the second term is the only one. A mixture with the recent past is a cache model (Kuhn and De Mori,
1990). Verification is exact for any ranking, so the lookup changes no output. Its use in a draft
tree is ours.
"""

from collections import Counter
from collections.abc import Mapping

ORDER = 6
# The shares a_n in SmolLM2's answers to prompts of functions (docs/lab_notes/small.md).
USUAL = (0.0, 0.2, 0.45, 0.65, 0.7, 0.8, 0.9)
TRUST = 4

Suffix = tuple[int, ...]  # the last tokens of a text, at most ORDER


class Lookup:
    """The n-grams of one sequence's text so far, on the host.

    `suffix` has the last tokens of the text, at most ORDER, and `length` counts all of them.
    """

    def __init__(self, tokens: list[int]):
        self.suffix: Suffix = ()
        self.length = 0
        self._following: dict[Suffix, Counter[int]] = {}
        self._right, self._guesses = [0] * (ORDER + 1), [0] * (ORDER + 1)  # by n
        self.extend(tokens)

    def extend(self, tokens: list[int]) -> None:
        """Append tokens to the text, and count which of them had followed the same ones before."""
        for token in tokens:
            n, counts = self._find(self.suffix)
            self._guesses[n] += 1
            self._right[n] += token in counts
            for n in range(1, len(self.suffix) + 1):
                self._following.setdefault(self.suffix[-n:], Counter())[token] += 1
            self.suffix = append(self.suffix, token)
        self.length += len(tokens)

    def guesses(
        self, suffix: Suffix, drafted: Mapping[int, float] | None = None
    ) -> tuple[dict[int, float], float]:
        """Return the tokens that followed a suffix, {v: c_n(v) / sum c_n}, and their weight a_n.

        Both are empty, {} and 0, where the suffix's last token has not occurred before. `drafted`
        has log q of a drafter's likeliest tokens, if it was run.
        """
        n, counts = self._find(suffix)
        if not n:
            return {}, 0.0
        weight = (self._right[n] + TRUST * USUAL[n]) / (self._guesses[n] + TRUST)
        return {token: count / counts.total() for token, count in counts.items()}, weight

    def _find(self, suffix: Suffix) -> tuple[int, Counter[int]]:
        """Find the longest suffix that occurred before: its length n, and the tokens after it."""
        for n in range(len(suffix), 0, -1):
            if (counts := self._following.get(suffix[-n:])) is not None:
                return n, counts
        return 0, Counter()


def append(suffix: Suffix, token: int) -> Suffix:
    """Return the suffix of a text after one more token."""
    return (*suffix, token)[-ORDER:]
