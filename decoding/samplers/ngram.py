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

from dataclasses import dataclass
from functools import cache
from math import exp, log

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from decoding.drafting.earlier_answers import FEW_REQUESTS, KEPT_TOKENS, AnswerReader, Kept, seen
from decoding.drafting.next_noise import NextNoise
from decoding.drafting.pass_cost import is_dear
from decoding.drafting.prompt_lookup import TRUST, Lookup
from decoding.drafting.ranked_tree import catch_up, lookups_of
from decoding.drafting.tree import Children, Path, Ranked, constrained, sort, suffix_of
from decoding.drafting.tree_limits import MAX_NODES
from decoding.engine.batch import Batch, State
from decoding.engine.params import KEYED, SamplingParams
from decoding.method import Amount, ByNumber, Count, Method, Text

# By requests: the most nodes, and what a token more costs on two CPU cores, of the time in which
# plain decoding makes one; the second where a wider pass is dear (docs/results/ngram.md).
NODES: ByNumber[Count] = {1: 16, 4: 8}
Least = ByNumber[Amount | ByNumber[Amount]]
LEAST: tuple[Least, Least] = (
    {1: {0: 0.15, 1: 0.06}, 4: 0.3, 16: 0.5},
    {1: {0: 0.3, 1: 0.12}, 4: 0.3, 16: 0.5},
)
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


class NgramSampler(AnswerReader):
    """Speculative decoding without a drafter, with the n-grams of this text and earlier answers.

    Args:
        target, tokenizer: Any causal LM and its tokenizer.
        block_size: k, tokens of a chain, and of a tree's longest path where the target draws.
        nodes, least: See `BlockSampler`; `least` None: what suits this machine.
        kept_tokens, answers: See `AnswerReader`.
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
        least: Amount | Least | None = None,
        kept_tokens: Kept = KEPT_TOKENS,
        answers: Text | None = None,
    ):
        super().__init__(
            target,
            tokenizer,
            block_size=block_size,
            nodes=nodes,
            least=LEAST[is_dear(target)] if least is None else least,
            lookup=False,
            fastest=FEW_REQUESTS,
            kept_tokens=kept_tokens,
            answers=answers,
        )

    def begin_drafting(self, batch: Batch, states: tuple[Tensor, ...]) -> None:
        batch.state = NgramState(lookups_of(batch, CheckedLookup))

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
        drawn = [None] * len(texts) if noise is None else map(NextNoise, noise)
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

    def _ranking(self, text: CheckedLookup, noise: NextNoise | None) -> Children:
        """Make the function of a sequence's ranked tokens after a path."""

        @cache
        def children(path: Path) -> Ranked:
            depth = len(path)
            if noise is not None and depth >= noise.most:
                return [], []
            tokens, scores = self._seen(text, path)
            if noise is not None and tokens:
                chosen = np.array(scores) + noise.of(depth, tokens)
                others = log(_rest(scores) * noise.mean(depth))
                chosen -= np.logaddexp(np.logaddexp.reduce(chosen), others)
                scores = chosen.tolist()
            return sort(tokens, scores)

        return children

    def _seen(self, text: Lookup, path: Path) -> Ranked:
        """Return the tokens that were seen after a path and log p of each."""
        suffix = suffix_of(text, path)
        found = seen(*text.guesses(suffix), self.ngrams.after(suffix))
        return [*found], [log(p) for p in found.values()]


def _rest(scores: list[float]) -> float:
    """Return the probability of the tokens that were never seen."""
    return max(UNSEEN, 1 - sum(map(exp, scores)))


METHOD = Method(NgramSampler, local=("answers",))
