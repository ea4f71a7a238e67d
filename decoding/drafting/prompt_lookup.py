"""Prompt lookup: a text's own n-grams as a proposal for its next token.

Texts repeat themselves, code most of all; transformers' prompt lookup decoding drafts from that
alone. Here it is one component of the mixture that ranks a draft tree:

    p(v | text, path) = (1 - a_n) p(v | drafter) + a_n [v = c_n]

n is the length of the longest suffix (at most ORDER tokens) that occurred before, c_n the token
that followed its last occurrence, and a_n the share of such guesses that were right in this text,
so that a text that does not repeat itself gives little weight. After the drafter's last position
the second term is the only one. A mixture with the recent past is a cache model (Kuhn and De Mori,
1990). Verification is exact for any ranking, so the lookup changes no output. Its use in a draft
tree is ours.
"""

ORDER = 3

Suffix = tuple[int, ...]  # the last tokens of a text, at most ORDER


class Lookup:
    """The n-grams of one sequence's text so far, on the host.

    `suffix` has the last tokens of the text, at most ORDER, and `length` counts all of them.
    """

    def __init__(self, tokens: list[int]):
        self.suffix: Suffix = ()
        self.length = 0
        self._following: dict[Suffix, int] = {}
        self._right, self._guesses = [0] * (ORDER + 1), [0] * (ORDER + 1)  # by n
        self.extend(tokens)

    def extend(self, tokens: list[int]) -> None:
        """Append tokens to the text, and count which of them would have been guessed."""
        for token in tokens:
            n, guess = self._find(self.suffix)
            self._guesses[n] += 1
            self._right[n] += guess == token
            for n in range(1, len(self.suffix) + 1):
                self._following[self.suffix[-n:]] = token
            self.suffix = append(self.suffix, token)
        self.length += len(tokens)

    def guess(self, suffix: Suffix) -> tuple[int | None, float]:
        """Guess the token c_n after a suffix; return it and its weight a_n in [0, 1).

        (None, 0) where the suffix's last token has not occurred before.
        """
        n, guess = self._find(suffix)
        # Counted as if two guesses had been wrong: the weight is 0 until one was right.
        return guess, self._right[n] / (self._guesses[n] + 2)

    def _find(self, suffix: Suffix) -> tuple[int, int | None]:
        """Find the longest suffix that occurred before: its length n, and the token after it."""
        for n in range(len(suffix), 0, -1):
            if (token := self._following.get(suffix[-n:])) is not None:
                return n, token
        return 0, None


def append(suffix: Suffix, token: int) -> Suffix:
    """Return the suffix of a text after one more token."""
    return (*suffix, token)[-ORDER:]
