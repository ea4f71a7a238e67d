"""`StateReader`: a sampler whose drafter reads the target's hidden states at committed tokens.

The states come from the verifying passes: those of accepted tokens reach the drafter, those of
rejected ones never do.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from decoding.drafting.block_sampler import BlockSampler
from decoding.engine.batch import Batch, State
from decoding.engine.cache import CountedNetwork
from decoding.engine.params import SamplingParams

MOST_UNREAD = 64  # tokens whose states wait, while nothing is drafted, for the drafter


@dataclass
class UnreadStates(State):
    """The target's hidden states that the drafter has not read yet.

    They are at committed tokens but for the last one, aligned to the right: [B, w, L H], of which
    the last `missing` [B] of each row count.
    """

    states: Tensor
    missing: Tensor

    def join(self, fresh: Self) -> None:
        width = max(self.states.shape[1], fresh.states.shape[1])
        for state in (self, fresh):
            state.states = pad(state.states, (0, 0, width - state.states.shape[1], 0))
        super().join(fresh)

    def add(self, states: Tensor, counts: Tensor) -> None:
        """Add the first counts [B] of each row's states [B, m, L H]."""
        ends, self.missing = self.states.shape[1] + counts, self.missing + counts
        self.states = _right_aligned(torch.cat([self.states, states], 1), ends, self.missing)

    def take(self) -> tuple[Tensor, Tensor]:
        """Return the states and how many of each row count; none are left."""
        width = int(self.missing.max())
        found = self.states[:, self.states.shape[1] - width :], self.missing
        self.states, self.missing = self.states[:, :0], torch.zeros_like(self.missing)
        return found


class StateReader(BlockSampler):
    """A block sampler whose drafter reads `hidden_layers` of its target.

    Where there are none, no states are kept: the drafter reads the target's cache.
    """

    @abstractmethod
    def cached_drafter(self, batch: Batch) -> CountedNetwork:
        """Return the drafter with a cache for a batch, whose target has read the prompts."""

    def states_before(self, batch: Batch) -> tuple[Tensor, ...]:
        return self.prefill(batch, "target", self.cached_target(batch))

    def begin_drafting(self, batch: Batch, states: tuple[Tensor, ...]) -> None:
        batch.networks["drafter"] = self.cached_drafter(batch)
        if not self.hidden_layers:
            return
        ends = batch.lengths - 1
        if states:
            ends = ends - int(ends.max()) + states[0].shape[1]  # without what was known before
            missing = ends.clamp_min(0)
            found = _right_aligned(torch.cat(states, -1), ends, missing)
        else:  # nothing was read
            missing = torch.zeros_like(ends)
            width = len(self.hidden_layers) * self.target.config.get_text_config().hidden_size
            found = torch.zeros(len(missing), 0, width, device=missing.device)
        batch.state = UnreadStates(found, missing)

    def begin(self, batch: Batch, params: SamplingParams) -> None:
        super().begin(batch, params)
        ways = {self.way(requests, params) for requests in self.fastest}
        if self.hidden_layers and "plain" in ways:
            self.read_waiting(batch)  # else a prompt's states are read with all rows beside it

    def read_waiting(self, batch: Batch) -> None:
        """Let the drafter read the states that wait; each row's last is read again by its draft."""
        last, missing = batch.state.states[:, -1:], batch.state.missing.clamp_max(1)
        if batch.networks["drafter"].cache is not None:  # else the last is all that a draft reads
            self.draft_logits(batch, 1)
        batch.state.states, batch.state.missing = last, missing

    def follow(
        self, batch: Batch, states: tuple[Tensor, ...], path: Tensor, counts: Tensor
    ) -> None:
        if not states:
            return
        found = torch.cat(states, -1)
        rows = torch.arange(len(path), device=path.device)[:, None]
        batch.state.add(found[rows, path], counts)

    def undrafted(self, batch: Batch, params: SamplingParams) -> tuple[Tensor, Tensor]:
        if self.hidden_layers and batch.state.states.shape[1] > MOST_UNREAD:
            self.read_waiting(batch)
        return super().undrafted(batch, params)


def _right_aligned(states: Tensor, ends: Tensor, counts: Tensor) -> Tensor:
    """Return the counts [B] of states [B, m, H] before `ends` [B] as the last of [B, w, H]."""
    width = int(counts.max())
    steps = torch.arange(width, device=counts.device) - (width - ends)[:, None]
    rows = torch.arange(len(counts), device=counts.device)[:, None]
    return states[rows, steps.clamp_min(0)]
