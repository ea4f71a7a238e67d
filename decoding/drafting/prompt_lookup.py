"""What a text itself says of its next token: what stood there when its last tokens stood before.

Texts repeat themselves, code most of all, and prompt lookup drafts from nothing else (the
transformers option of that name). Here it is one voice more in the ranking of a draft tree:

    p(v | text, path) = (1 - a_n) p(v | drafter) + a_n [v = c_n]

n: the most of the last tokens (ORDER at most) that stood in a row before; c_n: what followed them
last; a_n: how often such a c_n was right in this very text, so that one that does not repeat itself
hardly listens. Behind the drafter's last position the second term is all there is. A mixture with
the recent past is a cache model (Kuhn and De Mori, 1990); a tree may be ranked by anything,
verification does not change. Ours.
"""

ORDER = 3

Last = tuple[int, ...]  # the last tokens of a text, ORDER at most


class Lookup:
    """One row's text so far, on the host."""

    def __init__(self, tokens: list[int]):
        self.last: Last = ()
        self._after: dict[Last, int] = {}
        self._right, self._guesses = [0] * (ORDER + 1), [0] * (ORDER + 1)  # by n
        self.extend(tokens)

    def extend(self, tokens: list[int]) -> None:
        """The text goes on."""
        for token in tokens:
            n, guess = self._find(self.last)
            self._guesses[n] += 1
            self._right[n] += guess == token
            for n in range(1, len(self.last) + 1):
                self._after[self.last[-n:]] = token
            self.last = then(self.last, token)

    def guess(self, last: Last) -> tuple[int | None, float]:
        """(c_n, a_n) behind a text that ends so; (None, 0) where the last token is new."""
        n, guess = self._find(last)
        # Two guesses that were wrong before there is any: silence until one was right.
        return guess, self._right[n] / (self._guesses[n] + 2)

    def _find(self, last: Last) -> tuple[int, int | None]:
        for n in range(len(last), 0, -1):
            if (token := self._after.get(last[-n:])) is not None:
                return n, token
        return 0, None


def then(last: Last, token: int) -> Last:
    """The last tokens when one more has come."""
    return (*last, token)[-ORDER:]
