"""The unfinished requests of a batch, and a method's state between cycles."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Self

import torch
from torch import Tensor

from decoding.engine.grammar import Constraint
from decoding.engine.randomness import Randomness


@dataclass
class State:
    """A method's state between cycles: tensors [B, ...], lists of B items on the host, or None."""

    def select(self, rows: Tensor) -> None:
        """Keep these rows [B'] of every field."""
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, Tensor):
                setattr(self, f.name, value[rows])
            elif isinstance(value, list):
                setattr(self, f.name, [value[b] for b in rows.tolist()])
            else:
                assert value is None, f"{f.name} is no tensor [B, ...], no list of B items, no None"

    def join(self, fresh: Self) -> None:
        """Append the rows of another state."""
        for f in fields(self):
            ours, theirs = getattr(self, f.name), getattr(fresh, f.name)
            if isinstance(ours, Tensor):
                setattr(self, f.name, torch.cat([ours, theirs]))
            elif ours is not None:
                setattr(self, f.name, ours + theirs)


class Batch:
    """The unfinished requests of a batch, one per row of each tensor.

    Attributes:
        requests: The number of each row's request in the call.
        tokens: [B, capacity], committed tokens and, after them, guesses or nothing.
        lengths: [B], how many tokens are committed.
        starts: [B], how many of them are the prompt's.
        constraints: Of each row's answer, None where it has none.
        networks: The method's networks by name ('target', 'drafter'), of kinds of `CountedNetwork`.
        drafts: The state of the chain or tree that drafts (`decoding.drafting`).
        drafted: Tokens that the last pass verified: of every row, or of each [B].
        expected: Rows once others have joined, and tokens of the longest prompt, for which caches
            reserve memory.
        chunk: The most tokens of a row that one pass prefills; None: all.
        between: Called after each of these passes.
        reused: Tokens of its one prompt that the target did not read (`engine.prefixes`).
    """

    def __init__(self, prompts: list[list[int]], capacity: int, randomness: Randomness, device):
        self.requests = list(range(len(prompts)))
        self.tokens = torch.zeros(len(prompts), capacity, dtype=torch.long, device=device)
        for b, prompt in enumerate(prompts):
            self.tokens[b, : len(prompt)] = torch.tensor(prompt, device=device)
        self.lengths = torch.tensor([len(p) for p in prompts], device=device)
        self.starts = self.lengths
        self.constraints: list[Constraint | None] = [None] * len(prompts)
        self.randomness = randomness
        self.networks: dict[str, Any] = {}
        self.state: Any = State()
        self.drafts: Any = State()
        self.drafted: int | Tensor = 0
        self.expected = (0, 0)
        self.chunk: int | None = None
        self.between: Callable[[], None] = lambda: None
        self.reused = 0

    def append(self, tokens: Tensor, counts: Tensor) -> None:
        """Commit the first counts [B] of tokens [B, m] to each row."""
        slots = self.lengths[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        # After a row's length there is nothing yet, or guesses: the surplus is written too.
        self.tokens.scatter_(1, slots, tokens)
        self.lengths = self.lengths + counts

    def join(self, fresh: "Batch") -> None:
        """Append the requests of another batch of equal capacity and parameters, not used again."""
        for name, network in self.networks.items():
            network.join(fresh.networks[name], len(self.requests), len(fresh.requests))
        self.requests += fresh.requests
        self.tokens = torch.cat([self.tokens, fresh.tokens])
        self.lengths = torch.cat([self.lengths, fresh.lengths])
        self.starts = torch.cat([self.starts, fresh.starts])
        self.constraints += fresh.constraints
        self.state.join(fresh.state)
        self.drafts.join(fresh.drafts)
        self.randomness.join(fresh.randomness)

    def select(self, keep: list[int]) -> None:
        """Keep only these rows, in this order."""
        rows = torch.tensor(keep, device=self.tokens.device)
        self.requests = [self.requests[b] for b in keep]
        self.constraints = [self.constraints[b] for b in keep]
        self.starts = self.starts[rows]
        self.tokens, self.lengths = self.tokens[rows], self.lengths[rows]
        self.state.select(rows)
        self.drafts.select(rows)
        self.randomness.select(rows)
        for network in self.networks.values():
            network.select(rows)
