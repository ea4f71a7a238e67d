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
from decoding.engine.batch import Batch
from decoding.method import Text

KEPT_TOKENS = 2**19
FEW_REQUESTS = {1: {0: "tree"}, 4: {0: "tree"}, 16: {0: "plain"}}  # drafts for these alone
Kept = Annotated[int, Field(ge=0, le=2**24)]


def seen(own: dict[int, float], weight: float, earlier: dict[int, float]) -> dict[int, float]:
    """Return p(v) = (1 - a) p(v | earlier answers) + a p(v | this text), of all tokens of either.

    `own` and `weight` a are what a text's `Lookup` guesses after some tokens, and `earlier` what
    `Ngrams` do.
    """
    found = {token: (1 - weight) * p for token, p in earlier.items()}
    for token, p in own.items():
        found[token] = found.get(token, 0.0) + weight * p
    return found


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
