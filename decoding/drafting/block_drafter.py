"""`BlockDrafter`: the interface of a sampler whose drafter drafts a block in one pass.

With a tail (`models.dflash`) a part of the drafter runs again for each drafted token.
"""

import math
from abc import abstractmethod
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from decoding.drafting.markov import MarkovScores
from decoding.drafting.prompt_lookup import Lookup
from decoding.drafting.tree import Children
from decoding.engine import vocabulary
from decoding.engine.batch import Batch
from decoding.engine.grammar import exclude
from decoding.engine.params import SamplingParams
from decoding.engine.sampler import Sampler
from decoding.engine.verify import choose
from decoding.engine.warp import fit_vocabulary, preceding, warp
from decoding.method import ByNumber
from models.markov import MarkovHead

T = TypeVar("T")


class BlockDrafter(Sampler):
    """A sampler whose drafter gives k distributions over the target's tokens in one pass.

    A method supplies `begin_drafting`, `draft_logits` or, without a network, `children`, and
    `follow` where its drafter reads the target's hidden states.

    Args:
        target, tokenizer: See `Sampler`.
        draft_ids: [Vd], the target's tokens that the drafter has logits of (`engine.vocabulary`);
            None: all.
        markov: The drafter's Markov head, over the same tokens; None: a block's positions are
            independent.
    """

    drafter: PreTrainedModel
    block_size: int  # tokens drafted a cycle unless a request asks for others
    tail = False  # whether the drafter runs again for each drafted token (`extend`)
    lookup_with_noise = False  # whether prompt lookup ranks trees where the target draws, too

    def __init__(
        self,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        draft_ids: Tensor | None = None,
        markov: MarkovHead | None = None,
    ):
        super().__init__(target, tokenizer)
        if draft_ids is not None:
            vocabulary.check_vocabulary(None, self.vocabulary, draft_ids)
            draft_ids = draft_ids.to(self.device)
        self.draft_ids, self.markov = draft_ids, None
        if markov is not None:
            self.markov = MarkovScores(markov, self.vocabulary, draft_ids, self.device)

    @abstractmethod
    def begin_drafting(self, batch: Batch, states: tuple[Tensor, ...]) -> None:
        """Prefill the drafter, and set `batch.state`: all that `draft_logits` needs.

        The target has all prompt tokens but the last; `states` are its `hidden_layers` at these.
        """

    def draft_logits(self, batch: Batch, k: int) -> Tensor:
        """Run the drafter once: return logits [B, k, V] at the next k positions.

        They are independent given the prefix, and -inf for tokens that are never drafted
        (`fitted`). With a `tail` they are those of the first position only, [B, 1, V].
        """
        raise NotImplementedError

    def extend(self, batch: Batch, tokens: Tensor, depth: Tensor, parent: Tensor) -> Tensor:
        """Return the logits [B, M, V] after drafted tokens [B, M], by the drafter's `tail`.

        `depth` [B, M] is 1 for tokens after the committed ones; `parent` [B, M] is the number of
        the drafted token before each, in the order in which they were given, -1 for none.
        """
        raise NotImplementedError

    def own_logits(self, batch: Batch, k: int, *drafted: Tensor) -> Tensor:
        """Return the logits of `draft_logits`, or of `extend` with `drafted`, over `draft_ids`."""
        logits = self.extend(batch, *drafted) if drafted else self.draft_logits(batch, k)
        return logits if self.draft_ids is None else logits[..., self.draft_ids]

    def children(self, batch: Batch, noise: Tensor | None) -> list[Children] | None:
        """Return the ranking of each sequence's drafts, if they are ranked without a network.

        `noise` [B, k + 1, V] is that of the next positions; None at temperature 0.
        """
        return None

    def lookup_of(self, tokens: list[int]) -> Lookup:
        """Return the prompt lookup of a request, which ranks its trees too."""
        return Lookup(tokens)

    def follow(
        self, batch: Batch, states: tuple[Tensor, ...], path: Tensor, counts: Tensor
    ) -> None:
        """Give the drafter the target's hidden states at the tokens that a cycle accepted.

        Args:
            batch: The requests, before their new tokens are committed.
            states: The outputs [B, Q, H] of `hidden_layers` at the last committed token and the
                draft.
            path: [B, m], indices of the accepted tokens in the pass; 0 is the last committed token.
            counts: [B], entries of a path that count. The token that the target adds has no state
                yet.
        """

    def undrafted(self, batch: Batch, params: SamplingParams) -> tuple[Tensor, Tensor]:
        """Emit one token in a target pass without drafts."""
        tokens, output = self.one_token(batch, params)
        counts = torch.ones_like(batch.lengths)
        self.follow(batch, output.hidden_states, torch.zeros_like(tokens), counts)
        return tokens, counts

    def states_before(self, batch: Batch) -> tuple[Tensor, ...]:
        """Prefill the target, if the drafter reads it; return the states for `begin_drafting`."""
        return ()

    def block_logits(self, batch: Batch, k: int) -> Tensor:
        """Return the logits of `draft_logits`, with a Markov head's term of the first position."""
        logits = self.draft_logits(batch, k)
        if self.markov is not None:
            last = batch.tokens.gather(1, batch.lengths[:, None] - 1)
            logits[:, :1] += self.markov.following(last)
        return logits

    def draft_pass(self, batch: Batch, k: int, params: SamplingParams) -> Tensor:
        """Return warped drafter logits [B, k, V] of `block_logits`."""
        return self.warped_draft(self.block_logits(batch, k), batch, params)

    def forced_pass(self, batch: Batch, tokens: Tensor, params: SamplingParams) -> Tensor:
        """Return warped drafter logits [B, k, V] at known tokens [B, k].

        With a Markov head or a tail each position is conditioned on the known tokens before it.
        """
        k = tokens.shape[1]
        if not self.conditional:
            return self.draft_pass(batch, k, params)
        first = self.block_logits(batch, k)
        logits = [self._after(batch, first, tokens[:, :i]) for i in range(k)]
        return self.warped_draft(torch.cat(logits, 1), batch, params)

    @property
    def conditional(self) -> bool:
        """Whether a position's distribution depends on the tokens drafted before it."""
        return self.tail or self.markov is not None

    def _after(self, batch: Batch, logits: Tensor, drafted: Tensor) -> Tensor:
        """Return the logits [B, 1, V] after drafted tokens [B, i], from those of the block."""
        i = drafted.shape[1]
        if not i or not self.conditional:
            return logits[:, i : i + 1]
        last = drafted[:, -1:]
        if self.tail:
            return self.extend(batch, last, torch.full_like(last, i), torch.full_like(last, i - 2))
        assert self.markov is not None
        return logits[:, i : i + 1] + self.markov.following(last)

    def draft_chain(
        self, batch: Batch, k: int, noise: Tensor | None, params: SamplingParams
    ) -> tuple[Tensor, Tensor | None]:
        """Draft k tokens in one pass; conditional or constrained ones are then drawn one by one.

        `noise` [B, k or more, V] is keyed; None at temperature 0, or where drafts are accepted by
        chance. Returns the draft [B, k], and the q [B, k, V] that it was drawn from, None if noise
        is keyed.
        """
        if not self.conditional and not any(batch.constraints):
            return self._drawn(self.draft_pass(batch, k, params), noise, batch, params)
        logits, draft, q = self.block_logits(batch, k), batch.tokens[:, :0], []
        for i in range(k):
            at = self.constrained(self._after(batch, logits, draft), batch, draft)
            at = self.warped_draft(at, batch, params)
            g = None if noise is None else noise[:, i:]
            token, probs = self._drawn(at, g, batch, params)
            draft = torch.cat([draft, token], 1)
            q.append(probs)
        return draft, None if params.keyed else torch.cat(q, 1)

    def _drawn(
        self, logits: Tensor, noise: Tensor | None, batch: Batch, params: SamplingParams
    ) -> tuple[Tensor, Tensor | None]:
        """Draw tokens [B, n] from warped logits [B, n, V]; also return their distributions."""
        if params.keyed:
            return choose(logits, noise), None
        q = logits.softmax(-1)
        return batch.randomness.categorical(q), q

    def fitted(self, logits: Tensor, excluded: list[int]) -> Tensor:
        """Return logits [B, k, Vd] over the target's V tokens; -inf for those `excluded`."""
        return fit_vocabulary(logits, self.vocabulary, excluded, self.draft_ids)

    def warped_draft(self, logits: Tensor, batch: Batch, params: SamplingParams) -> Tensor:
        """Warp drafter logits [B, n, V] as the target's are warped, but for constraints."""
        committed = batch.tokens, batch.starts, batch.lengths, batch.tokens[:, :0]
        return warp(logits, params, preceding(params, *committed, self.vocabulary))

    def constrained(self, logits: Tensor, batch: Batch, draft: Tensor) -> Tensor:
        """Return drafter logits [B, 1, V] after a draft [B, i], -inf for what may not follow.

        Where the drafter has nothing that may, all that may are equally likely.
        """
        found = exclude(logits, self.constraints(batch), draft)
        if not (lost := found.isneginf().all(-1, keepdim=True)).any():
            return found
        allowed = exclude(torch.zeros_like(logits), batch.constraints, draft)
        return torch.where(lost, allowed, found)


def numbered(knob: ByNumber[ByNumber[T]]) -> dict[int, dict[float, T]]:
    """Return a knob {requests: {temperature: value}}, whose keys are text in JSON."""
    return {int(n): {float(t): x for t, x in of.items()} for n, of in knob.items()}


def for_requests(known: dict[int, Any], requests: int) -> Any:
    """Return the value of the number that is nearest to a number of requests, by their ratio.

    A pass costs more with each row, so 8 requests are like 16 and not like one; where two numbers
    are as near, the larger one's, whose drafts cost less.
    """
    return known[min(known, key=lambda n: (abs(math.log(max(n, 1) / max(requests, 1))), -n))]


def setting(known: dict[int, Any], requests: int, temperature: float) -> Any:
    """Return the value for so many requests, {requests: value or {temperature: value}}."""
    found = for_requests(known, requests)
    return nearest(found, temperature) if isinstance(found, dict) else found


def nearest(known: dict, x: float) -> Any:
    """Return the value of the key that is nearest to x."""
    return known[min(known, key=lambda other: abs(other - x))]
