"""Multi-block Jacobi decoding with rejection recycling (pcLLM, Algorithm 1).

Several blocks are refined in one pass. The first, the real-active block, commits; in the others,
pseudo-active, a guess that was predicted from the guesses before it is frozen until the block's
turn comes, when all of it is verified. Guesses that were given up are kept in a pool: where one
holds the last committed token, what follows it there is verified beside the block's own guesses,
as one more branch of the same pass, and the branch with most accepted tokens wins.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from decoding.engine import verify
from decoding.engine.cache import CachedNetwork
from decoding.engine.params import SamplingParams
from decoding.engine.sampler import Rows
from decoding.engine.verify import choose
from decoding.samplers.jacobi import JacobiSampler, JacobiState, behind, guesses
from models.masks import branches

KNOBS = {"block_size": int, "blocks": int, "spawn_ratio": float, "pool_size": int}


@dataclass
class MultiBlockState(JacobiState):
    """Beside the prompts' lengths: what the active blocks have accepted and given up.

    end: [B], the position after the last active block. frozen: bool [B, capacity], guesses that
    are kept until their block is the first one. pool: [B, pool size, n], given-up guesses; -1
    empty.
    """

    end: Tensor
    frozen: Tensor
    pool: Tensor


class JacobiMRSampler(JacobiSampler):
    """block_size: n. blocks: K, active ones at most. spawn_ratio: r, a new block is begun when
    ceil(r n) tokens of an active one are accepted. pool_size: given-up guesses that are kept.

    K = 1 and pool_size 0 is plain Jacobi decoding, block by block.
    """

    def __init__(
        self, *args, blocks: int = 2, spawn_ratio: float = 0.5, pool_size: int = 2, **kwargs
    ):
        super().__init__(*args, running=False, **kwargs)
        for name, value, ok, rule in (
            ("blocks", blocks, blocks >= 1, "at least 1"),
            ("spawn_ratio", spawn_ratio, 0 <= spawn_ratio <= 1, "in [0, 1]"),
            ("pool_size", pool_size, pool_size >= 0, "at least 0"),
        ):
            if not ok:
                raise ValueError(f"{name}={value} is not allowed: it must be {rule}")
        self.blocks, self.spawn_ratio, self.pool_size = blocks, spawn_ratio, pool_size

    def margin(self, params: SamplingParams) -> int:
        """A pass may look ahead by all blocks, and a slot each for every candidate's tokens."""
        n = params.block_size or self.block_size
        return (self.blocks + self.pool_size) * n + 2

    def begin(self, rows: Rows, params: SamplingParams) -> None:
        """One active block, nothing frozen, an empty pool."""
        super().begin(rows, params)
        n = params.block_size or self.block_size
        rows.state = MultiBlockState(
            prompt=rows.lengths,
            end=rows.lengths + n,
            frozen=torch.zeros_like(rows.tokens, dtype=torch.bool),
            pool=rows.tokens.new_full((len(rows.row), self.pool_size, n), -1),
        )

    def cached_target(self, rows: Rows) -> CachedNetwork:
        """A cache for passes with branches."""
        return CachedNetwork(self.target, branches, rows.tokens.shape[1])

    def width(self, rows: Rows, params: SamplingParams) -> Tensor:
        """All active blocks' tokens that are not committed: [B]."""
        return rows.state.end - rows.lengths

    def cycle(self, rows: Rows, params: SamplingParams) -> tuple[Tensor, Tensor]:
        """Lines 4 to 15 of Algorithm 1."""
        n = params.block_size or self.block_size
        width = self.width(rows, params)
        guess = guesses(rows, int(width.max()))
        candidates, found = self.recall(rows)
        main, others = self.branch_pass(rows, guess, candidates, params)
        accepted, _ = verify.coupled(guess, main)
        emitted = accepted.minimum(width) + 1
        kept = self.pseudo_accepted(rows, guess, main, n) & later_blocks(rows, guess, emitted, n)
        choice = torch.where(pad(kept, (0, 1)), pad(guess, (0, 1)), main)
        choice = behind(rows, choice, width.maximum(emitted))
        if others:
            choice, emitted = self.best(rows, choice, emitted, candidates, found, others)
            kept = kept & later_blocks(rows, guess, emitted, n)
        self.spawn(rows, emitted, kept & (choice[:, : guess.shape[1]] == guess), n)
        self.recycle(rows, choice, emitted, n)
        return choice, emitted

    def recall(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """Candidates [B, C, n] from the pool, and how many each row has [B] (they come first).

        A candidate is what follows the last committed token in a member of the pool; what stands
        before it there fills it up.
        """
        pool = rows.state.pool
        n = pool.shape[-1]
        last = rows.tokens.gather(1, rows.lengths[:, None] - 1)
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
        self, rows: Rows, guess: Tensor, candidates: Tensor, params: SamplingParams
    ) -> tuple[Tensor, list[Tensor]]:
        """One pass: choices [B, W+1] at and behind the guesses, and [B, n+1] for each candidate."""
        C, n = candidates.shape[1:]
        W, device = guess.shape[1], guess.device
        if not C:
            logits = self.target_pass(rows, guess, params).logits
            return choose(logits, self.noise(rows, W + 1, params)), []
        drafts, sizes = [guess, *candidates.unbind(1)], [W, *[n] * C]
        rows.drafted = sum(sizes)
        last = rows.lengths[:, None] - 1
        tokens = torch.cat([rows.tokens.gather(1, last), *drafts], 1)
        steps = torch.cat([torch.arange(1, size + 1, device=device) for size in sizes])
        positions = last + pad(steps, (1, 0))
        branch = torch.arange(C + 1, device=device).repeat_interleave(
            torch.tensor(sizes, device=device)
        )
        branch = pad(branch, (1, 0), value=-1).expand_as(positions)
        target = rows.networks["target"]
        logits = target(tokens, positions, keep=tokens.shape[1], branch=branch).logits
        noise = self.noise(rows, max(sizes) + 1, params)
        choices = []
        for draft, at_draft in zip(drafts, logits[:, 1:].split(sizes, 1)):
            here = torch.cat([logits[:, :1], at_draft], 1)
            choices.append(choose(self.warped(here, rows, draft, params), noise))
        return choices[0], choices[1:]

    def best(
        self,
        rows: Rows,
        choice: Tensor,
        emitted: Tensor,
        candidates: Tensor,
        found: Tensor,
        others: list[Tensor],
    ) -> tuple[Tensor, Tensor]:
        """The branch that emits most: its choices over the blocks' own, its keys and values kept.

        choice [B, W+1], emitted [B]: of the blocks' own guesses, branch 0.
        """
        n, W = candidates.shape[-1], choice.shape[1] - 1
        new = guesses(rows, max(W, n) + 1)
        new[:, : W + 1] = choice
        winner = torch.zeros_like(emitted)
        for c, other in enumerate(others):
            theirs = verify.coupled(candidates[:, c], other)[0] + 1
            wins = (theirs > emitted) & (c < found)
            winner, emitted = winner.where(~wins, c + 1), emitted.where(~wins, theirs)
            new[:, : n + 1] = torch.where(wins[:, None], other, new[:, : n + 1])
        if winner.any():
            to = rows.lengths[:, None] + torch.arange(n, device=choice.device)
            # The first candidate stands W slots behind the blocks' guesses, the next ones n each.
            ahead = torch.where(winner > 0, W + (winner - 1) * n, 0)
            rows.networks["target"].cache.move(to + ahead[:, None], to)
        return new, emitted

    def pseudo_accepted(self, rows: Rows, guess: Tensor, main: Tensor, n: int) -> Tensor:
        """Which guesses [B, W] stand together with all guesses of their block before them."""
        W = guess.shape[1]
        places = torch.arange(W, device=guess.device)
        at = rows.lengths[:, None] + places
        wrong = ~((guess == main[:, :W]) | rows.state.frozen.gather(1, at))
        wrong |= at >= rows.state.end[:, None]
        count = pad(wrong.long().cumsum(1), (1, 0))
        done = (rows.lengths - rows.state.prompt)[:, None]
        opening = ((done + places) // n * n - done).clamp_min(0)
        return count[:, 1:] == count.gather(1, opening)

    def spawn(self, rows: Rows, emitted: Tensor, kept: Tensor, n: int) -> None:
        """Freeze what is kept; begin a block if some active one has ceil(r n) accepted tokens."""
        state, after = rows.state, rows.lengths + emitted
        at = rows.lengths[:, None] + torch.arange(kept.shape[1], device=kept.device)
        state.frozen = state.frozen.scatter(1, at, kept)
        done = (after - state.prompt) % n  # of the block that is real-active now
        opening = after - done
        end = state.end.maximum(opening + n)
        s = math.ceil(self.spawn_ratio * n)
        due = done >= s
        if s and self.blocks > 1:
            # Frozen tokens are the first of their block: the s-th tells whether there are s.
            marks = opening[:, None] + n * torch.arange(1, self.blocks, device=at.device) + s - 1
            last = state.frozen.shape[1] - 1  # a row that is over may reach further
            due = due | state.frozen.gather(1, marks.clamp_max(last)).any(1)
        state.end = end + n * (due & ((end - opening) // n < self.blocks))

    def recycle(self, rows: Rows, choice: Tensor, emitted: Tensor, n: int) -> None:
        """Put the guesses behind the emitted tokens into the pool, in the place of the oldest."""
        if not self.pool_size:
            return
        extended = torch.cat([choice, guesses(rows, n, choice.shape[1])], 1)
        tail = emitted[:, None] + torch.arange(n, device=choice.device)
        newest = extended.gather(1, tail)[:, None]
        rows.state.pool = torch.cat([newest, rows.state.pool[:, :-1]], 1)


def later_blocks(rows: Rows, guess: Tensor, emitted: Tensor, n: int) -> Tensor:
    """Which places [B, W] are behind the block that is real-active after emitted [B] tokens."""
    at = rows.lengths[:, None] + torch.arange(guess.shape[1], device=guess.device)
    after = rows.lengths + emitted
    return at >= (after - (after - rows.state.prompt) % n + n)[:, None]


def from_export(target, tokenizer, drafter, config: dict) -> JacobiMRSampler:
    """The sampler of an exported model; config: its `parade` entry."""
    return JacobiMRSampler(target, tokenizer, **{k: config[k] for k in KNOBS if k in config})
