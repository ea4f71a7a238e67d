"""The one place where a sampler's randomness comes from (design, section 3).

A counter-based generator: every number is a hash of (request seed, what it is for, where), so a
row's output depends on its own seed only, never on its neighbours, and nothing has a state that
a batch could disturb.
"""

import hashlib
import math
import secrets
from typing import Protocol

import torch
from torch import Tensor


class Randomness(Protocol):
    """What a sampler may draw. Tests put an enumerating one in its place."""

    def categorical(self, probs: Tensor) -> Tensor:
        """One token for each distribution: [B, ..., V] -> [B, ...]."""

    def accept(self, prob: Tensor) -> Tensor:
        """True with the given probability, elementwise: [B, ...] -> bool [B, ...]."""

    def gumbel(self, positions: Tensor, vocabulary: int) -> Tensor:
        """Gumbel noise of (row's seed, absolute position, token): [B, n] -> [B, n, vocabulary]."""

    def select(self, rows: Tensor) -> None:
        """Keep only these rows of the batch (the others are finished)."""


class ContinuousRandomness(Randomness, Protocol):
    """What a sampler of continuous tokens draws beside it."""

    def normal(self, shape: tuple[int, ...]) -> Tensor:
        """Standard normal numbers [B, ...], float64."""

    def split(self) -> "ContinuousRandomness":
        """Randomness of its own for a loop that takes some rows longer: one draw of this one."""

    def replace(self, rows: Tensor, fresh: "ContinuousRandomness") -> None:
        """These rows of the batch become those of `fresh`, which goes on where it stands."""


class KeyedRandomness:
    """Counter-based randomness for B requests: splitmix64 of (seed, purpose, counter, index).

    seeds: one whole number a row. ahead: draws that are made at once; it changes no number.
    Rows stay in step (each takes part in every draw until it is finished and dropped or replaced),
    so a row's draws so far are as many in a batch as for that row alone: those of the batch, less
    those from before it came (`behind`).
    """

    def __init__(
        self, seeds: list[int], device: torch.device | str = "cpu", ahead: int | None = None
    ):
        # Seeds may be any whole number; 63 bits of them are used.
        seed = torch.tensor([s % (1 << 63) for s in seeds], device=device)
        # [B, 2]: where the hashes of keyed noise begin, and those of draws.
        self.keys = _mix(seed[:, None] + seed.new_tensor([_purpose("gumbel"), _purpose("uniform")]))
        self.draws, self.ahead = 0, ahead or _AHEAD
        self.behind = torch.zeros_like(seed)
        self._ahead = torch.empty(len(seeds), 0, 0, device=device)  # see _uniform
        nothing = torch.empty(len(seeds), 0, dtype=torch.long, device=device)
        self._last = nothing, nothing[..., None].float()  # positions and noise, see gumbel
        self._tokens = torch.empty(0)  # what the hash of each token of the vocabulary adds to a key

    def categorical(self, probs: Tensor) -> Tensor:
        """See `Randomness`. Inverse of the cumulative distribution, in float64."""
        cumulative = probs.double().cumsum(-1)
        # u < 1, so the drawn entry is one where the sum rises: probability zero is never drawn.
        u = self._uniform(probs.shape[:-1]).unsqueeze(-1) * cumulative[..., -1:]
        drawn = torch.searchsorted(cumulative, u, right=True).squeeze(-1)
        return drawn.clamp_max(probs.shape[-1] - 1)

    def accept(self, prob: Tensor) -> Tensor:
        """See `Randomness`."""
        return self._uniform(prob.shape) < prob

    def gumbel(self, positions: Tensor, vocabulary: int) -> Tensor:
        """See `Randomness`. float32; equal on every device up to the rounding of its log.

        A cycle asks for most of the positions that the one before it asked for, so the noise of the
        last call is kept, and only what is new is made: it is not to be written to.
        """
        at, noise = self._last
        if noise.shape[-1] != vocabulary:
            at = at[:, :0]
        if torch.equal(at, positions):
            return noise
        same = positions[:, :, None] == at[:, None]
        new = ~same.any(-1)
        count = int(new.sum(-1).max())
        if count == positions.shape[1]:
            made = self._gumbel(positions, vocabulary)
        else:
            # Rows with fewer new positions make some again, which changes nothing.
            row = torch.arange(len(at), device=at.device)[:, None]
            first = new.int().argsort(dim=-1, descending=True, stable=True)[:, :count]
            made = noise[row, same.int().argmax(-1)]
            made[row, first] = self._gumbel(positions.gather(1, first), vocabulary)
        self._last = positions, made
        return made

    def _gumbel(self, positions: Tensor, vocabulary: int) -> Tensor:
        key = _mix(self.keys[:, :1] + positions * _STRIDE)
        if len(self._tokens) != vocabulary:
            self._tokens = torch.arange(1, vocabulary + 1, device=positions.device) * _STRIDE
        bits = _shift(_mix(key.unsqueeze(-1) + self._tokens), 11).bitwise_or_(1)  # odd: never 0
        v = bits.float().mul_(2.0**-53).clamp_max_(1 - 2**-24)
        # Exponential noise first: log1p keeps full precision where it matters, at large g.
        return v.neg_().log1p_().neg_().log_().neg_()

    def normal(self, shape: tuple[int, ...]) -> Tensor:
        """See `ContinuousRandomness`. Inverse of the normal distribution, in float64."""
        return torch.special.ndtri(self._uniform(torch.Size(shape)))

    def split(self) -> "KeyedRandomness":
        """See `ContinuousRandomness`. Its seeds are 52 bits drawn from this one."""
        seeds = (self._uniform(self.behind.shape) * 2.0**52).long()
        # Every round of a loop asks for more at once: nothing is worth making ahead.
        return KeyedRandomness(seeds.tolist(), self.keys.device, ahead=1)

    def select(self, rows: Tensor) -> None:
        """See `Randomness`."""
        self.keys, self.behind = self.keys[rows], self.behind[rows]
        self._ahead = self._ahead[rows]
        self._last = self._last[0][rows], self._last[1][rows]

    def replace(self, rows: Tensor, fresh: "KeyedRandomness") -> None:
        """See `ContinuousRandomness`."""
        self.keys[rows] = fresh.keys
        self._last = self._last[0][:, :0], self._last[1]
        self.behind[rows] = self.draws - fresh.draws + fresh.behind
        self._ahead[rows] = self._numbers(rows, self._ahead.shape[-1])

    def _uniform(self, shape: torch.Size) -> Tensor:
        """float64 in (0, 1), one for each element of [B, ...]; every call is a new draw.

        Number i of draw d is a hash of (seed, d, i). They are made for many draws at once, because
        a handful of numbers costs as much as thousands.
        """
        count, at = math.prod(shape[1:]), self.draws % self.ahead
        if at == 0 or count > self._ahead.shape[-1]:
            self._ahead = self._numbers(slice(None), max(count, self._ahead.shape[-1], 16))
        self.draws += 1
        return self._ahead[:, at, :count].reshape(shape)

    def _numbers(self, rows: Tensor | slice, width: int) -> Tensor:
        """`width` numbers of each of the draws that are made at once: [rows, ahead, width]."""
        first = self.draws - self.draws % self.ahead
        draws = torch.arange(first, first + self.ahead, device=self.keys.device)
        draws = (draws - self.behind[rows][:, None]) * _STRIDE
        key = _mix(self.keys[rows, 1:] + draws)
        index = torch.arange(1, width + 1, device=key.device) * _STRIDE
        return _unit(_mix(key.unsqueeze(-1) + index))


def fresh_seed() -> int:
    """A seed for a request that names none."""
    return secrets.randbits(48)


def derived_seed(seed: int, *parts: int | str) -> int:
    """A seed that depends on another one and on what it is for: a 63-bit hash of both.

    Neighbouring seeds share no noise: with `seed + i` request 1 of seed 1 would be request 0 of
    seed 2. 63 bits keep a million derived seeds apart (a collision has probability 5e-8).

    Args:
        seed: Any whole number.
        parts: What the derived seed is for, such as an index or an id.
    """
    text = "\0".join(map(str, (seed, *parts))).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def request_seeds(seed: int, count: int) -> list[int]:
    """The seeds of the requests of one call: the first has the given one, the others are derived.

    So one request alone keeps the text of its seed.
    """
    return [seed, *(derived_seed(seed, i) for i in range(1, count))][:count]


_AHEAD = 32  # draws made at once

# The odd constant of splitmix64 (2^64 / golden ratio), as a signed 64-bit number.
_STRIDE = 0x9E3779B97F4A7C15 - (1 << 64)


def _purpose(name: str) -> int:
    return int.from_bytes(name.encode()[:7], "little")


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64 (torch's own is arithmetic)."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    """The finaliser of splitmix64; int64 multiplication wraps."""
    x = _shift(x, 30).bitwise_xor_(x).mul_(0xBF58476D1CE4E5B9 - (1 << 64))
    x = _shift(x, 27).bitwise_xor_(x).mul_(0x94D049BB133111EB - (1 << 64))
    return _shift(x, 31).bitwise_xor_(x)


def _unit(x: Tensor) -> Tensor:
    """Int64 hash -> float64 in (0, 1), 52 bits."""
    return (_shift(x, 12).double() + 0.5) * 2.0**-52
