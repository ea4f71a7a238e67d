"""`AnswerReader`: a sampler that drafts with n-grams of the answers given before.

Verification is exact for any drafts, so a request's text does not depend on earlier ones, but its
speed does.
"""

from collections.abc import Sequence
from copy import copy
from typing import Annotated, Self

from pydantic import Field
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from data.corpora.answers import chosen_rows
from data.text.tokenizer import checked_manifest
from decoding.drafting.block_sampler import BlockSampler
from decoding.drafting.ngrams import N, Ngrams
from decoding.drafting.prompt_lookup import TRUST, Lookup
from decoding.engine.batch import Batch
from decoding.method import Text

KEPT_TOKENS = 2**19
Kept = Annotated[int, Field(ge=0, le=2**24)]


class CheckedLookup(Lookup):
    """A request's text, with a count of the guesses of its next token that were right.

    n-grams of other texts may be too sure of what comes next in this one. Their probabilities are
    therefore multiplied by `share`, the right guesses over the sum of their probabilities, as if
    TRUST guesses of probability 1 had been right before; so drafts that do not pay are left out.
    """

    _guess: tuple[int, float] | None = None  # a token and its probability
    _hits: int = TRUST
    _expected: float = TRUST

    @property
    def share(self) -> float:
        """Return the right guesses over the sum of their probabilities, at most 1."""
        return min(1.0, self._hits / self._expected)

    def guess(self, token: int, probability: float) -> None:
        """Note the likeliest next token."""
        self._guess = token, probability

    def extend(self, tokens: list[int]) -> None:
        if self._guess is not None and tokens:
            token, probability = self._guess
            self._hits += token == tokens[0]
            self._expected += probability
            self._guess = None
        super().extend(tokens)


class AnswerReader(BlockSampler):
    """A block sampler that keeps the n-grams of earlier answers.

    Args:
        target, tokenizer, knobs: See `BlockSampler`.
        kept_tokens: Tokens of earlier answers whose n-grams are kept; 0: none, so that nobody can
            tell from the speed of an answer what others were told.
        answers: The folder of a collection of the target's answers (`decoding.collect`), which
            count as earlier ones, besides `kept_tokens`.

    Attributes:
        ngrams: Those of the earlier answers.

    Raises:
        ValueError: `answers` is no collection of this tokenizer's.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        kept_tokens: Kept = KEPT_TOKENS,
        answers: Text | None = None,
        **knobs,
    ):
        super().__init__(target, tokenizer, **knobs)
        texts: list[list[int]] = []
        if answers is not None:
            checked_manifest(answers, tokenizer)
            rows = (row for _, rows in chosen_rows(answers, "train", None) for row in rows)
            texts += (row["prompt_ids"][-N:] + row["answer_ids"] for row in rows)
        self.kept_tokens = kept_tokens
        self.ngrams = Ngrams(self.vocabulary, kept_tokens + sum(map(len, texts)))
        self.ngrams.add(texts)
        self._first = copy(self.ngrams)

    def fresh(self) -> Self:
        new = copy(self)
        new.ngrams = copy(self._first)
        return new

    def ended(self, batch: Batch, rows: Sequence[int]) -> None:
        super().ended(batch, rows)
        if not self.kept_tokens:
            return
        given: list[tuple[Tensor, int, int]] = [
            (batch.tokens[row], int(batch.starts[row]), int(batch.lengths[row])) for row in rows
        ]
        self.ngrams.add(tokens[max(0, start - N) : end].tolist() for tokens, start, end in given)
