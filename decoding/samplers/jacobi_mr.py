"""Multi-block Jacobi decoding with rejection recycling (pcLLM, Algorithm 1).

Several blocks are refined in one pass. Only the first, the real-active block, commits tokens. In
the others, the pseudo-active ones, a guess that the guesses before it predicted is frozen until its
block is real-active and verifies it. Given-up guesses go to a pool. A member of the pool with the
last committed token gives a candidate: the tokens after it there, a further branch of the same
pass. The branch with most accepted tokens wins.
"""

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from decoding.engine import verify
from decoding.engine.batch import Batch
from decoding.engine.cache import CachedNetwork
from decoding.engine.params import SamplingParams
from decoding.engine.verify import choose
from decoding.method import MAX_COUNT, Count, Method, Share
from decoding.samplers.jacobi import JacobiSampler, JacobiState, guesses, with_old_guesses
from models.masks import Predicate, branches


@dataclass
class MultiBlockState(JacobiState):
    """The prompts' lengths, and the guesses that the active blocks have frozen and given up."""

    end: Tensor  # the position after the last active block, [B]
    frozen: Tensor  # which guesses are kept until their block is real-active, bool [B, capacity]
    pool: Tensor  # given-up guesses, newest first, int64 [B, pool size, n]; -1 where empty


class JacobiMRSampler(JacobiSampler):
    """Jacobi decoding of several blocks at once, with recycled guesses.

    With blocks=1 and pool_size=0 it is Jacobi decoding block by block.

    Args:
        target, tokenizer, block_size: See `JacobiSampler`.
        blocks: K, the most blocks that are active at once.
        spawn_ratio: r; a block is begun when ceil(r n) tokens of an active one are accepted.
        pool_size: How many blocks of given-up guesses are kept.
    """

    chains = False  # but branches

    def __init__(
        self,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        block_size: Count = 16,
        blocks: Count = 2,
        spawn_ratio: Share = 0.5,
        pool_size: Annotated[int, Field(ge=0, le=MAX_COUNT)] = 2,
    ):
        super().__init__(target, tokenizer, block_size=block_size, running=False)
        self.blocks, self.spawn_ratio, self.pool_size = blocks, spawn_ratio, pool_size

    def margin(self, params: SamplingParams) -> int:
        # A pass may look ahead by all blocks, and every candidate's tokens need a slot each.
        n = params.block_size or self.block_size
        return (self.blocks + self.pool_size) * n + 2

    def begin(self, batch: Batch, params: SamplingParams) -> None:
        super().begin(batch, params)
        n = params.block_size or self.block_size
        batch.state = MultiBlockState(
            prompt=batch.lengths,
            end=batch.lengths + n,
            frozen=torch.zeros_like(batch.tokens, dtype=torch.bool),
            pool=batch.tokens.new_full((len(batch.requests), self.pool_size, n), -1),
        )

    def cached_target(self, batch: Batch, predicate: Predicate = branches) -> CachedNetwork:
        return CachedNetwork(self.target, predicate, batch.tokens.shape[1])

    def width(self, batch: Batch, params: SamplingParams) -> Tensor:
        return batch.state.end - batch.lengths

    def cycle(self, batch: Batch, params: SamplingParams) -> tuple[Tensor, Tensor]:
        """Run one pass over all active blocks and candidates (Algorithm 1, lines 4 to 15)."""
        n = params.block_size or self.block_size
        width = self.width(batch, params)
        guess = guesses(batch, int(width.max()))
        candidates, found = self.recall(batch)
        main, others = self.branch_pass(batch, guess, candidates, params)
        accepted, _ = verify.coupled(guess, main)
        emitted = accepted.minimum(width) + 1
        kept = self.pseudo_accepted(batch, guess, main, n) & later_blocks(batch, guess, emitted, n)
        choice = torch.where(pad(kept, (0, 1)), pad(guess, (0, 1)), main)
        choice = with_old_guesses(batch, choice, width.maximum(emitted))
        if others:
            choice, emitted = self.best(batch, choice, emitted, candidates, found, others)
            kept = kept & later_blocks(batch, guess, emitted, n)
        self.spawn(batch, emitted, kept & (choice[:, : guess.shape[1]] == guess), n)
        self.recycle(batch, choice, emitted, n)
        return choice, emitted

    def recall(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Find candidates [B, C, n] for the next n tokens in the pool, and each row's number [B].

        A candidate is the tokens that follow the last committed token in a member of the pool,
        filled up to n with those before it; a row's candidates come first.
        """
        pool = batch.state.pool
        n = pool.shape[-1]
        last = batch.tokens.gather(1, batch.lengths[:, None] - 1)
        match = pool[:, :, :-1] == last[:, :, None]
        has, order = match.any(-1).long().sort(dim=1, descending=True, stable=True)
        found = has.sum(1)
        C = int(found.max()) if self.pool_size else 0
        order = order[:, :C, None]
        start = match.long().argmax(-1, keepdim=True).gather(1, order) if C else order
        steps = torch.arange(1, n + 1, device=pool.device)
        picked = pool.gather(1, order.expand(-1, -1, n)).gather(2, (start + steps) % n)
        return picked.clamp_min(0), found

    def branch_pass(
        self, batch: Batch, guess: Tensor, candidates: Tensor, params: SamplingParams
    ) -> tuple[Tensor, list[Tensor]]:
        """Run one target pass over the blocks' guesses [B, W] and the candidates [B, C, n].

        Returns the target's choices at and after the guesses, [B, W + 1], and C tensors [B, n + 1].
        """
        C, n = candidates.shape[1:]
        W, device = guess.shape[1], guess.device
        if not C:
            logits = self.target_pass(batch, guess, params).logits
            return choose(logits, self.noise(batch, W + 1, params)), []
        drafts, sizes = [guess, *candidates.unbind(1)], [W, *[n] * C]
        batch.drafted = sum(sizes)
        last = batch.lengths[:, None] - 1
        tokens = torch.cat([batch.tokens.gather(1, last), *drafts], 1)
        steps = torch.cat([torch.arange(1, size + 1, device=device) for size in sizes])
        positions = last + pad(steps, (1, 0))
        branch = torch.arange(C + 1, device=device).repeat_interleave(
            torch.tensor(sizes, device=device)
        )
        branch = pad(branch, (1, 0), value=-1).expand_as(positions)
        target = batch.networks["target"]
        logits = target(tokens, positions, keep=tokens.shape[1], branch=branch).logits
        noise = self.noise(batch, max(sizes) + 1, params)
        choices = []
        for draft, at_draft in zip(drafts, logits[:, 1:].split(sizes, 1)):
            here = torch.cat([logits[:, :1], at_draft], 1)
            choices.append(choose(self.warped(here, batch, draft, params), noise))
        return choices[0], choices[1:]

    def best(
        self,
        batch: Batch,
        choice: Tensor,
        emitted: Tensor,
        candidates: Tensor,
        found: Tensor,
        others: list[Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Take the branch that emits most tokens, and keep its keys and values in the cache.

        Branch 0 has the choices [B, W + 1] and emits `emitted` [B]; see `recall` and `branch_pass`
        for the others. Returns the best branch's choices, then branch 0's and old guesses, [B,
        max(W, n) + 1], and what it emits, [B].
        """
        n, W = candidates.shape[-1], choice.shape[1] - 1
        new = guesses(batch, max(W, n) + 1)
        new[:, : W + 1] = choice
        winner = torch.zeros_like(emitted)
        for c, other in enumerate(others):
            theirs = verify.coupled(candidates[:, c], other)[0] + 1
            wins = (theirs > emitted) & (c < found)
            winner, emitted = winner.where(~wins, c + 1), emitted.where(~wins, theirs)
            new[:, : n + 1] = torch.where(wins[:, None], other, new[:, : n + 1])
        if winner.any():
            to = batch.lengths[:, None] + torch.arange(n, device=choice.device)
            # Candidate 1 starts W slots after the first guess, each other n after the one before.
            ahead = torch.where(winner > 0, W + (winner - 1) * n, 0)
            batch.networks["target"].cache.move(to + ahead[:, None], to)
        return new, emitted

    def pseudo_accepted(self, batch: Batch, guess: Tensor, main: Tensor, n: int) -> Tensor:
        """Find the guesses that are right, with all of their block before them: bool [B, W]."""
        W = guess.shape[1]
        steps = torch.arange(W, device=guess.device)
        at = batch.lengths[:, None] + steps
        wrong = ~((guess == main[:, :W]) | batch.state.frozen.gather(1, at))
        wrong |= at >= batch.state.end[:, None]
        count = pad(wrong.long().cumsum(1), (1, 0))
        done = (batch.lengths - batch.state.prompt)[:, None]
        opening = ((done + steps) // n * n - done).clamp_min(0)
        return count[:, 1:] == count.gather(1, opening)

    def spawn(self, batch: Batch, emitted: Tensor, kept: Tensor, n: int) -> None:
        """Freeze kept guesses; begin a block where an active one has ceil(r n) accepted tokens."""
        state, after = batch.state, batch.lengths + emitted
        at = batch.lengths[:, None] + torch.arange(kept.shape[1], device=kept.device)
        state.frozen = state.frozen.scatter(1, at, kept)
        done = (after - state.prompt) % n  # committed tokens of the block that is real-active now
        opening = after - done
        end = state.end.maximum(opening + n)
        s = math.ceil(self.spawn_ratio * n)
        due = done >= s
        if s and self.blocks > 1:
            # Frozen tokens are the first ones of their block, so the s-th tells if there are s.
            marks = opening[:, None] + n * torch.arange(1, self.blocks, device=at.device) + s - 1
            last = state.frozen.shape[1] - 1  # a finished row may reach further
            due = due | state.frozen.gather(1, marks.clamp_max(last)).any(1)
        state.end = end + n * (due & ((end - opening) // n < self.blocks))

    def recycle(self, batch: Batch, choice: Tensor, emitted: Tensor, n: int) -> None:
        """Put the guesses after the emitted tokens into the pool, and drop its oldest member."""
        if not self.pool_size:
            return
        extended = torch.cat([choice, guesses(batch, n, choice.shape[1])], 1)
        tail = emitted[:, None] + torch.arange(n, device=choice.device)
        newest = extended.gather(1, tail)[:, None]
        batch.state.pool = torch.cat([newest, batch.state.pool[:, :-1]], 1)


def later_blocks(batch: Batch, guess: Tensor, emitted: Tensor, n: int) -> Tensor:
    """Find the guesses [B, W] in blocks of n after the next real-active one: bool [B, W]."""
    at = batch.lengths[:, None] + torch.arange(guess.shape[1], device=guess.device)
    after = batch.lengths + emitted
    return at >= (after - (after - batch.state.prompt) % n + n)[:, None]


METHOD = Method(JacobiMRSampler)
