"""Counter-based randomness, the only source of a sampler's random numbers.

Every number is a hash of (request seed, purpose, index), so a request's output depends on its own
seed and never on the other requests of its batch.
"""

import hashlib
import math
import secrets
from typing import Protocol, Self

import torch
from torch import Tensor

from models.few_queries import loops_on, pool


class Randomness(Protocol):
    """The random draws of a sampler. Tests implement it by enumerating every outcome."""

    def categorical(self, probs: Tensor) -> Tensor:
        """Draw one token from each distribution: [B, ..., V] -> int64 [B, ...]."""

    def accept(self, prob: Tensor) -> Tensor:
        """Draw True with the given probability, elementwise: [B, ...] -> bool [B, ...]."""

    def gumbel(self, positions: Tensor, vocabulary: int) -> Tensor:
        """Draw Gumbel noise keyed by (seed, position, token): [B, n] -> [B, n, vocabulary]."""

    def select(self, rows: Tensor) -> None:
        """Keep these rows of the batch, in this order; the others are finished."""

    def join(self, fresh: Self) -> None:
        """Append the rows of `fresh`."""


class ContinuousRandomness(Randomness, Protocol):
    """The random draws of a sampler of continuous tokens."""

    def normal(self, shape: tuple[int, ...]) -> Tensor:
        """Draw standard normal numbers of this shape [B, ...], float64."""

    def split(self) -> "ContinuousRandomness":
        """Return new randomness for a loop in which some rows draw more; it costs one draw."""

    def replace(self, rows: Tensor, fresh: Self) -> None:
        """Replace these rows of the batch by those of `fresh`, which keep their draw counts."""


class KeyedRandomness(ContinuousRandomness):
    """Counter-based randomness for B requests: splitmix64 of (seed, purpose, counter, index).

    Every row takes part in every draw until it is dropped or replaced. So a row has as many draws
    in a batch as alone: the batch's, less its `offset`, the draws from before it came.

    Args:
        seeds: One whole number a row; 63 bits of each are used.
        device: Where the numbers are made.
        ahead: Draws that are made at once, which changes no number; None is 32.

    `keys` [B, 2] are those of the hashes of keyed noise and of draws.
    """

    def __init__(
        self, seeds: list[int], device: torch.device | str = "cpu", ahead: int | None = None
    ):
        seed = torch.tensor([s % (1 << 63) for s in seeds], device=device)
        self.keys = _mix(seed[:, None] + seed.new_tensor([_purpose("gumbel"), _purpose("uniform")]))
        self.draws, self.ahead = 0, ahead or _AHEAD
        self.offset = torch.zeros_like(seed)
        self._ahead = seed.new_empty(len(seeds), 0, 0, dtype=torch.float64)  # see _uniform
        self._last = _nothing(self.keys)  # positions and noise, see gumbel
        self._tokens = seed.new_empty(0)  # added to a key for each token of the vocabulary

    def categorical(self, probs: Tensor) -> Tensor:
        # Inverse of the cumulative distribution, in float64.
        cumulative = probs.double().cumsum(-1)
        # u < 1, so the drawn entry is one where the sum rises: probability zero is never drawn.
        u = self._uniform(probs.shape[:-1]).unsqueeze(-1) * cumulative[..., -1:]
        drawn = torch.searchsorted(cumulative, u, right=True).squeeze(-1)
        return drawn.clamp_max(probs.shape[-1] - 1)

    def accept(self, prob: Tensor) -> Tensor:
        return self._uniform(prob.shape) < prob

    def gumbel(self, positions: Tensor, vocabulary: int) -> Tensor:
        """Return keyed Gumbel noise, float32; equal on every device up to the rounding of its log.

        Cycles share most positions, so noise is kept, of the last call that had a new one: do not
        write to it.
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
            row = torch.arange(len(at), device=at.device)[:, None]
            if not count:
                return noise[row, same.int().argmax(-1)]
            # Rows with fewer new positions make some again, which changes nothing.
            first = new.int().argsort(dim=-1, descending=True, stable=True)[:, :count]
            made = noise[row, same.int().argmax(-1)]
            made[row, first] = self._gumbel(positions.gather(1, first), vocabulary)
        self._last = positions, made
        return made

    def _gumbel(self, positions: Tensor, vocabulary: int) -> Tensor:
        shape, device = (*positions.shape, vocabulary), positions.device
        made = torch.empty(shape, dtype=torch.float32, device=device)
        if (compiled := loops_on(device)) is not None:
            given = self.keys[:, 0].contiguous(), positions.contiguous(), made
            with pool(compiled):
                compiled.gumbel(*(x.numpy() for x in given))
            return made
        key = _mix(self.keys[:, :1] + positions * _STRIDE)
        keys, made = key.flatten(), made.flatten(0, 1)
        if len(self._tokens) != vocabulary:
            self._tokens = torch.arange(1, vocabulary + 1, device=positions.device) * _STRIDE
        # A CPU makes few positions at a time: then what lies between stays in the core's cache.
        few = max(1, _CACHED // vocabulary) if device.type == "cpu" else len(keys)
        for part, out in zip(keys.split(few), made.split(few)):
            bits = _shift(_mix(part[:, None] + self._tokens), 11).bitwise_or_(1)  # odd: never 0
            v = out.copy_(bits).mul_(2.0**-53).clamp_max_(1 - 2**-24)
            # Exponential noise first: log1p keeps full precision where it matters, at large g.
            v.neg_().log1p_().neg_().log_().neg_()
        return made.view(shape)

    def normal(self, shape: tuple[int, ...]) -> Tensor:
        # Inverse of the cumulative distribution, in float64.
        return torch.special.ndtri(self._uniform(torch.Size(shape)))

    def split(self) -> "KeyedRandomness":
        seeds = (self._uniform(self.offset.shape) * 2.0**52).long()  # 52 bits
        # Every round of a loop asks for more numbers at once, so none are made ahead.
        return KeyedRandomness(seeds.tolist(), self.keys.device, ahead=1)

    def select(self, rows: Tensor) -> None:
        self.keys, self.offset = self.keys[rows], self.offset[rows]
        self._ahead = self._ahead[rows]
        self._last = self._last[0][rows], self._last[1][rows]

    def join(self, fresh: Self) -> None:
        self.keys = torch.cat([self.keys, fresh.keys])
        self.offset = torch.cat([self.offset, self.draws - fresh.draws + fresh.offset])
        self._ahead = self._numbers(slice(None), self._ahead.shape[-1])
        self._last = _nothing(self.keys)

    def replace(self, rows: Tensor, fresh: Self) -> None:
        self.keys[rows] = fresh.keys
        self._last = self._last[0][:, :0], self._last[1]
        self.offset[rows] = self.draws - fresh.draws + fresh.offset
        self._ahead[rows] = self._numbers(rows, self._ahead.shape[-1])

    def _uniform(self, shape: torch.Size) -> Tensor:
        """Draw uniform numbers in (0, 1), float64 [B, ...]: number i of draw d hashes (seed, d, i).

        Many draws are made at once, as a few cost as much as thousands.
        """
        count, at = math.prod(shape[1:]), self.draws % self.ahead
        if at == 0 or count > self._ahead.shape[-1]:
            self._ahead = self._numbers(slice(None), max(count, self._ahead.shape[-1], 16))
        self.draws += 1
        return self._ahead[:, at, :count].reshape(shape)

    def _numbers(self, rows: Tensor | slice, width: int) -> Tensor:
        """Return the first `width` numbers of all draws made at once: [rows, ahead, width]."""
        first = self.draws - self.draws % self.ahead
        draws = torch.arange(first, first + self.ahead, device=self.keys.device)
        draws = (draws - self.offset[rows][:, None]) * _STRIDE
        key = _mix(self.keys[rows, 1:] + draws)
        index = torch.arange(1, width + 1, device=key.device) * _STRIDE
        return _unit(_mix(key.unsqueeze(-1) + index))


def _nothing(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return no positions, and no noise of them."""
    positions = keys[:, :0]
    return positions, positions[..., None].float()


def fresh_seed() -> int:
    """Draw a seed of 48 bits, for a request without one."""
    return secrets.randbits(48)


def derived_seed(seed: int, *parts: int | str) -> int:
    """Derive a 63-bit seed by a hash of a seed and of the new one's purpose, such as an index.

    Neighbouring seeds share no noise: with `seed + i` request 1 of seed 1 would be request 0 of
    seed 2. 63 bits keep a million seeds apart (a collision has probability 5e-8).
    """
    text = "\0".join(map(str, (seed, *parts))).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def request_seeds(seed: int, count: int) -> list[int]:
    """Return the seeds of a call's requests: the call's own seed first, then derived ones."""
    return [seed, *(derived_seed(seed, i) for i in range(1, count))][:count]


_AHEAD = 32  # draws made at once
_CACHED = 2**16  # numbers of keyed noise made at once on a CPU

# The odd constant of splitmix64 (2^64 / golden ratio), as a signed 64-bit number.
_STRIDE = 0x9E3779B97F4A7C15 - (1 << 64)


def _purpose(name: str) -> int:
    return int.from_bytes(name.encode()[:7], "little")


def _shift(x: Tensor, bits: int) -> Tensor:
    """Shift int64 right logically; torch's own shift is arithmetic."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    """Apply the finaliser of splitmix64; int64 multiplication wraps."""
    x = _shift(x, 30).bitwise_xor_(x).mul_(0xBF58476D1CE4E5B9 - (1 << 64))
    x = _shift(x, 27).bitwise_xor_(x).mul_(0x94D049BB133111EB - (1 << 64))
    return _shift(x, 31).bitwise_xor_(x)


def _unit(x: Tensor) -> Tensor:
    """Map int64 hashes to float64 in (0, 1), with 52 bits."""
    return (_shift(x, 12).double() + 0.5) * 2.0**-52
