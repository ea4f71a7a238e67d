"""Decoding with n-grams as drafts: no drafter, nothing to train.

Drafts are ranked by what followed the same tokens before:

    p(v | text, path) = (1 - a_n) p(v | earlier answers) + a_n c_n(v) / sum c_n,

with the n-grams of the request's own text (`drafting.prompt_lookup`) and those of the answers that
the sampler has given before (`drafting.ngrams`); tokens that neither has seen share the rest. A
tree is ranked by log p + g where the target chooses with keyed noise g, and a draft is made where
its probability, times the share of guesses that were right in this text, pays for a wider pass.
Verification is exact for any drafts, so a request's text does not depend on earlier ones, but its
speed does.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from functools import cache
from math import exp, log
from typing import Annotated, Self

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from data.corpora.answers import chosen_rows
from data.text.tokenizer import checked_manifest
from decoding.drafting.block_sampler import BlockSampler
from decoding.drafting.ngrams import N, Ngrams
from decoding.drafting.prompt_lookup import TRUST, Lookup
from decoding.drafting.ranked_tree import catch_up, lookups_of
from decoding.drafting.tree import Children, Path, Ranked, constrained, mixed, sort, suffix_of
from decoding.drafting.tree_limits import MAX_NODES
from decoding.engine.batch import Batch, State
from decoding.engine.params import KEYED, SamplingParams
from decoding.method import Amount, ByNumber, Count, Method, Text

# By requests: the most nodes, and what a token more in a pass costs of it on two CPU cores. There
# sixteen requests are decoded without drafts, which cost what they bring (docs/results/ngram.md).
NODES: ByNumber[Count] = {1: 16, 4: 4}
LEAST: ByNumber[Amount] = {1: 0.06, 4: 0.3}
FASTEST = {1: {0: "tree"}, 4: {0: "tree"}, 16: {0: "plain"}}
UNSEEN = 1e-3  # probability of all tokens that were never seen, at the least
FILLER = log(1e-9)  # score of a draft that nothing speaks for


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


@dataclass
class NgramState(State):
    """The state between cycles."""

    texts: list[CheckedLookup]  # of each request


class NgramSampler(BlockSampler):
    """Speculative decoding without a drafter, with the n-grams of this text and earlier answers.

    Args:
        target, tokenizer: Any causal LM and its tokenizer.
        block_size: k, tokens of a chain, and of a tree's longest path where the target draws.
        nodes, least: See `BlockSampler`.
        kept_tokens: Tokens of earlier answers whose n-grams are kept; 0: none, so that nobody can
            tell from the speed of an answer what others were told.
        answers: The folder of a collection of the target's answers (`decoding.collect`), which
            count as earlier ones, besides `kept_tokens`.

    Attributes:
        ngrams: Those of the earlier answers.

    Raises:
        ValueError: `answers` is no collection of this tokenizer's.
    """

    fits_machine = False  # they come true now and then: a trial of a few cycles says little
    rules = KEYED  # by chance a text would depend on the drafts, which earlier answers change

    def __init__(
        self,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        block_size: Count = 5,
        nodes: Count | ByNumber[Count] = NODES,
        least: Amount | ByNumber[Amount] = LEAST,
        kept_tokens: Annotated[int, Field(ge=0, le=2**24)] = 2**19,
        answers: Text | None = None,
    ):
        super().__init__(
            target,
            tokenizer,
            block_size=block_size,
            nodes=nodes,
            least=least,
            lookup=False,
            fastest=FASTEST,
        )
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

    def begin_drafting(self, batch: Batch, states: tuple[Tensor, ...]) -> None:
        batch.state = NgramState(lookups_of(batch, CheckedLookup))

    def ended(self, batch: Batch, rows: Sequence[int]) -> None:
        super().ended(batch, rows)
        if not self.kept_tokens:
            return
        given = (
            (batch.tokens[row], int(batch.starts[row]), int(batch.lengths[row])) for row in rows
        )
        self.ngrams.add(tokens[max(0, start - N) : end].tolist() for tokens, start, end in given)

    def draft_chain(
        self, batch: Batch, k: int, noise: Tensor | None, params: SamplingParams
    ) -> tuple[Tensor, None]:
        """Draft the best token after the best ones before it: [B, k]."""
        drafts = []
        for children in self.children(batch, noise):
            path: Path = ()
            for _ in range(k):
                tokens, _ = children(path)
                path = (*path, tokens[0] if tokens else 0)
            drafts.append(path)
        return torch.tensor(drafts, device=self.device), None

    def children(self, batch: Batch, noise: Tensor | None) -> list[Children]:
        """Rank the tokens that were seen by log p + g, and add the log of the text's `share`."""
        texts: list[CheckedLookup] = batch.state.texts
        catch_up(texts, batch)
        depth = MAX_NODES if noise is None else noise.shape[1] - 1
        drawn = [None] * len(texts) if noise is None else noise
        found = [self._ranking(*of) for of in zip(texts, drawn)]
        allowed = [constrained(*of, depth) for of in zip(found, self.constraints(batch))]
        for text, children in zip(texts, allowed):
            tokens, scores = children(())
            if tokens:
                text.guess(tokens[0], exp(scores[0]))
        return [self._weighed(of, log(text.share)) for of, text in zip(allowed, texts)]

    def _weighed(self, children: Children, weight: float) -> Children:
        """Add a weight to the score of each token.

        The first token has as many candidates as a tree has nodes, whatever was seen.
        """

        def weighed(path: Path) -> Ranked:
            tokens, scores = children(path)
            scores = [score + weight for score in scores]
            if path:
                return tokens, scores
            others = [t for t in range(min(MAX_NODES, self.vocabulary)) if t not in tokens]
            return [*tokens, *others], [*scores, *[FILLER] * len(others)]

        return weighed

    def _ranking(self, text: CheckedLookup, noise: Tensor | None) -> Children:
        """Make the function of a sequence's ranked tokens after a path.

        `noise` [k + 1, V] is that of its next positions; paths then have k tokens at the most.
        """

        @cache
        def drawn(depth: int) -> tuple[np.ndarray, float]:
            assert noise is not None
            return noise[depth].cpu().numpy(), noise[depth].logsumexp(-1).item()

        @cache
        def children(path: Path) -> Ranked:
            if noise is not None and len(path) >= len(noise) - 1:
                return [], []
            tokens, scores = self._seen(text, path)
            if noise is not None and tokens:
                g, total = drawn(len(path))
                chosen = np.array(scores) + g[tokens]
                others = log(_rest(scores) / self.vocabulary) + total
                chosen -= np.logaddexp(np.logaddexp.reduce(chosen), others)
                scores = chosen.tolist()
            return sort(tokens, scores)

        return children

    def _seen(self, text: Lookup, path: Path) -> Ranked:
        """Return the tokens that were seen after a path and log p of each."""
        suffix = suffix_of(text, path)
        known = self.ngrams.after(suffix)
        return mixed(([*known], [log(p) for p in known.values()]), len(path), suffix, None, text)


def _rest(scores: list[float]) -> float:
    """Return the probability of the tokens that were never seen."""
    return max(UNSEEN, 1 - sum(map(exp, scores)))


METHOD = Method(NgramSampler, local=("answers",))
