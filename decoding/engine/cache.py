"""Ragged key/value caches, and networks that decode with them."""

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from models.attention import EAGER, GROUPED, Span, additive, cache_argument
from models.context import clamped, most_positions
from models.fused_layers import is_fused
from models.head import ReducedHead
from models.hidden_states import capture
from models.masks import Layout, Predicate, dense, limited
from models.placement import input_device, layers_by_device
from models.windows import windows_of

STEP = 256  # slots by which the memory of a cache grows


class Stored(NamedTuple):
    """The keys and values of one text: [layers, heads, tokens, head size] of each kind.

    `numbers` say which slice is which layer's; `size` is in bytes.
    """

    memory: dict[tuple, Tensor]
    numbers: dict[tuple, dict[int, int]]

    @property
    def size(self) -> int:
        """Return the bytes of all."""
        return sum(memory.nbytes for memory in self.memory.values())


class Places(NamedTuple):
    """Where a forward's tokens go: those from starts[b] on, [B + 1], to row b's `slots` [n].

    `flat` says that the forward has them as one row, without the padding of ragged rows.
    """

    starts: np.ndarray
    slots: Tensor
    flat: bool


class RaggedCache(Cache):
    """Keys and values [B, heads, capacity, head size] a layer, written at each row's own slots.

    Slot s of a row holds the token at position s. A rollback only lowers the caller's row length:
    the mask hides every slot after it, and the next forward writes over it. The last slot is
    scratch, for the padding of ragged rows. Memory grows with the slots that texts have reached,
    but `expected` rows and slots have room at once.

    Args:
        layers: Layers that write. All of one kind, shape and device share one tensor, [layers, B,
            heads, capacity, head size], so that a move is one operation.
        on: How many of them run on each device, where a network is spread over several.
    """

    def __init__(self, capacity: int, layers: int, on: Mapping[torch.device, int] | None = None):
        super().__init__(layers=[])
        self.capacity, self.depth, self.depth_on = capacity, layers, dict(on or {})
        self.expected = (0, 0)
        self._room = 0  # slots that there is memory for, the last of which is scratch
        self._memory: dict[tuple, Tensor] = {}
        # A layer's slice of it, and the slice's number: the order in which layers were reached.
        self._layers: defaultdict[tuple, dict[int, Tensor]] = defaultdict(dict)
        self._numbers: defaultdict[tuple, dict[int, int]] = defaultdict(dict)
        self.place(torch.zeros(1, 1, dtype=torch.long), 0)

    def place(self, slots: Tensor, visible: int, flat: Tensor | None = None) -> None:
        """Set the slots [B, Q] that the next forward writes, and how many slots it reads.

        `flat` [B, Q] are the tokens that it has, if it has them as one row (`Places`).
        """
        self._grow(visible)
        slots = slots.clamp_max(max(self._room - 1, 0))  # the scratch slot
        self.visible, starts = visible, np.arange(len(slots) + 1) * slots.shape[1]
        if flat is not None:
            starts[1:] = flat.sum(1).cumsum(0)
        written = slots.flatten() if flat is None else slots[flat]
        self.places = Places(starts, written, flat is not None)
        # One row is contiguous, and a slice is written twice as fast.
        self.start = int(slots[0, 0]) if len(slots) == 1 else None
        rows = torch.arange(len(slots), device=slots.device)[:, None]
        self._index = {slots.device: (rows, slots)}  # what is written to, by device

    def _grow(self, visible: int) -> None:
        """Make room for so many slots, and for scratch."""
        if not visible or visible < self._room or self._room == self.capacity:
            return
        visible = max(visible, self.expected[1])
        self._room = min(self.capacity, STEP * -(-(visible + 1) // STEP))
        for of, memory in self._memory.items():
            self._memory[of] = self._resized(memory, memory.shape[1])
        self._layers.clear()

    def _resized(self, memory: Tensor, rows: int) -> Tensor:
        """Return a copy with so many rows and all slots that there is room for."""
        depth, old, heads, _, size = memory.shape
        new = memory.new_zeros(depth, rows, heads, self._room, size)
        kept = slice(min(old, rows))
        new[:, kept, :, : self.visible] = memory[:, kept, :, : self.visible]
        return new

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs
    ) -> tuple[Tensor, Tensor]:
        """Write [B, heads, Q, D] of a layer; return all readable keys and values."""
        keys = self._write("keys", layer_idx, key_states)
        return keys, self._write("values", layer_idx, value_states)

    def _write(self, kind: str, layer: int, states: Tensor) -> Tensor:
        """Write states of one kind; return all that may be read."""
        assert not self.places.flat  # only fused layers know whose tokens are whose
        rows, heads, _, size = states.shape
        stored = self._stored(kind, layer, rows, heads, size, states)
        if self.start is not None:
            stored[:, :, self.start : self.start + states.shape[2]] = states
        else:
            # By index, whole heads at a time: a scatter is up to 25 times slower on the CPU.
            rows, slots = self._index_on(states.device)
            stored[rows, :, slots] = states.transpose(1, 2)
        return stored[:, :, : self.visible]

    def memory(
        self, layers: Sequence[int], heads: int, size: int, like: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        """Return keys and values [layers, rows or more, heads, room, size], to write at `places`.

        They are of the type of `like`, and on its device; None where they are not side by side.
        """
        found, rows = [], len(self.places.starts) - 1
        for kind in ("keys", "values"):
            of = kind, heads, size, like.dtype, like.device
            # All are known after the first pass, and then one tells whether there are rows.
            for layer in layers if len(self._layers[of]) < self.depth else layers[:1]:
                self._stored(kind, layer, rows, heads, size, like)
            numbers = [self._numbers[of][layer] for layer in layers]
            if numbers != [*range(numbers[0], numbers[0] + len(layers))]:
                return None
            found.append(self._memory[of][numbers[0] : numbers[-1] + 1])
        return found[0], found[1]

    def _stored(
        self, kind: str, layer: int, rows: int, heads: int, size: int, like: Tensor
    ) -> Tensor:
        """Return a layer's memory of one kind, [rows, heads, room, size]."""
        of = kind, heads, size, like.dtype, like.device
        if layer not in self._layers[of]:
            self._layers[of][layer] = self._layer(of, layer, rows, like)
        stored = self._layers[of][layer]
        assert len(stored) >= rows  # compiled loops write to it
        return stored[:rows] if len(stored) > rows else stored  # without rows that have left

    def _index_on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if device not in self._index:
            rows, slots = next(iter(self._index.values()))
            self._index[device] = rows.to(device), slots.to(device)
        return self._index[device]

    def _layer(self, of: tuple, layer: int, rows: int, like: Tensor) -> Tensor:
        if of not in self._memory:
            _, heads, size, _, device = of
            shape = max(rows, self.expected[0]), heads, self._room, size
            self._memory[of] = like.new_zeros(self.depth_on.get(device, self.depth), *shape)
        numbers = self._numbers[of]
        return self._memory[of][numbers.setdefault(layer, len(numbers))]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return how many slots the last forward could read."""
        return self.visible

    def move(self, source: Tensor, to: Tensor) -> None:
        """Copy the contents of slots source [B, m] to slots to [B, m]."""
        source, to = (slots.clamp_max(self._room - 1) for slots in (source, to))
        rows = torch.arange(len(source), device=source.device)[:, None]
        for memory in self._memory.values():
            r, here, there = (x.to(memory.device) for x in (rows, source, to))
            memory[:, r, :, there] = memory[:, r, :, here]

    def store(self, row: int, count: int) -> Stored:
        """Return a copy of the first `count` slots of a row."""
        memory = {of: m[:, row, :, :count].clone() for of, m in self._memory.items()}
        return Stored(memory, {of: dict(numbers) for of, numbers in self._numbers.items()})

    def restore(self, stored: Stored, count: int) -> None:
        """Write the first `count` slots of a row that was stored into the first row."""
        self._grow(count)
        for of, memory in stored.memory.items():
            depth, heads, _, size = memory.shape
            rows = max(1, self.expected[0])
            self._memory[of] = memory.new_zeros(depth, rows, heads, self._room, size)
            self._memory[of][:, 0, :, :count] = memory[:, :, :count]
            self._numbers[of] = dict(stored.numbers[of])
        self._layers.clear()
        self.visible = count

    def select(self, rows: Tensor) -> None:
        """Keep these rows, in this order; a row that keeps its index is not copied."""
        keep = rows.tolist()
        moved = [(to, b) for to, b in enumerate(keep) if to != b]
        if any(b < len(keep) for _, b in moved):  # its place is another's
            self._memory = {of: m[:, rows.to(m.device)] for of, m in self._memory.items()}
            self._layers.clear()
        elif moved:
            to, b = map(list, zip(*moved))
            for memory in self._memory.values():
                memory[:, to, :, : self.visible] = memory[:, b, :, : self.visible]

    @property
    def allocated(self) -> int:
        """Return the rows that there is memory for; finished ones keep theirs until `trim`."""
        return max((memory.shape[1] for memory in self._memory.values()), default=0)

    @property
    def nbytes(self) -> int:
        """Return the bytes of its memory; another thread may ask."""
        return sum(memory.nbytes for memory in [*self._memory.values()])

    def trim(self, count: int) -> None:
        """Free the memory of all rows after the first `count`."""
        self._memory = {of: self._resized(m, count) for of, m in self._memory.items()}
        self._layers.clear()

    def join(self, fresh: "RaggedCache", count: int, new: int) -> None:
        """Append the `new` rows of another cache after the first `count` rows."""
        assert fresh.capacity == self.capacity
        if not self._room:
            self._room = fresh._room
        self._grow(fresh._room - 1)
        # Without a forward so far there is nothing to copy, but memory to make.
        for of in self._memory.keys() | fresh._memory.keys():
            theirs = fresh._memory.get(of)
            ours = self._memory.get(of)
            if ours is None:
                assert theirs is not None
                depth, _, heads, _, size = theirs.shape
                shape = depth, max(count + new, self.expected[0]), heads, self._room, size
                self._memory[of] = ours = theirs.new_zeros(shape)
            elif ours.shape[1] < count + new:
                self._memory[of] = ours = self._resized(ours, count + new)
                self._layers.pop(of, None)
            if theirs is not None:
                self._numbers[of] = self._numbers[of] or fresh._numbers[of]
                assert self._numbers[of].items() >= fresh._numbers[of].items()
                read = fresh.visible
                ours[:, count : count + new, :, :read] = theirs[:, :new, :, :read]
        self.visible = max(self.visible, fresh.visible)


class SharedLayers:
    """Layers of another network's cache, for a drafter: its layer i has layer `layers[i]`.

    The drafter reads what the other network wrote for committed tokens, and writes its drafts to
    slots after them, which the next pass of the other network writes anew.
    """

    def __init__(self, cache: RaggedCache, layers: Sequence[int], dtype: torch.dtype):
        self.cache, self._layers, self._dtype = cache, layers, dtype
        self.capacity, self.place = cache.capacity, cache.place

    def update(self, key: Tensor, value: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Write [B, heads, Q, D] of a layer; return all readable keys and values in its type."""
        own = key.to(self._dtype), value.to(self._dtype)
        keys, values = self.cache.update(*own, self._layers[layer_idx])
        return keys.to(key.dtype), values.to(value.dtype)

    @property
    def places(self) -> Places:
        """Where the next forward's tokens go."""
        return self.cache.places

    def memory(
        self, layers: Sequence[int], heads: int, size: int, like: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        """Return `RaggedCache.memory`; None also where the drafter has another type."""
        if like.dtype != self._dtype:
            return None
        return self.cache.memory([self._layers[layer] for layer in layers], heads, size, like)


class Rows(Protocol):
    """A network's cache, as a batch uses it; `expected` rows and slots have room at once."""

    expected: tuple[int, int]

    @property
    def allocated(self) -> int:
        """Return the rows that there is memory for."""

    @property
    def nbytes(self) -> int:
        """Return the bytes of its memory; another thread may ask."""

    def trim(self, count: int) -> None:
        """Free the memory of all rows after the first `count`."""

    def select(self, rows: Tensor) -> None:
        """Keep these rows, in this order."""

    def join(self, fresh: Any, count: int, new: int) -> None:
        """Append the `new` rows of another cache after the first `count` rows."""


class CountedNetwork:
    """A network that counts its forwards and seconds; without a cache it runs inside `counted`."""

    cache: Rows | None = None

    def __init__(self, network: PreTrainedModel):
        self.network = network
        self.passes, self.seconds = 0, 0.0
        self._range = most_positions(network.config)
        # A forward on CUDA only queues work, so the clock must synchronize.
        self._queues = input_device(network).type == "cuda"

    def join(self, fresh: "CountedNetwork", count: int, new: int) -> None:
        """Append another batch's rows after the first `count`, and add its seconds."""
        if self.cache is not None and fresh.cache is not None:
            self.cache.join(fresh.cache, count, new)
        self.seconds += fresh.seconds

    def select(self, rows: Tensor) -> None:
        """Keep these rows of the cache, in this order."""
        if self.cache is not None:
            self.cache.select(rows)

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count and time one forward, run inside this context."""
        started = self._clock()
        yield
        self.seconds += self._clock() - started
        self.passes += 1

    def _clock(self) -> float:
        if self._queues:
            torch.cuda.synchronize()
        return time.perf_counter()


class TargetOutput(NamedTuple):
    """The output of a forward: logits [B, keep, V], and states [B, Q, H] of each hidden layer."""

    logits: Tensor
    hidden_states: tuple[Tensor, ...] = ()


class CachedNetwork(CountedNetwork):
    """A causal LM with a ragged cache, run on tokens at given positions.

    Args:
        predicate: The attention pattern, the very one that training used.
        capacity: Slots of the cache, with the scratch slot.
        hidden_layers: Decoder layers, 0-based, whose outputs every pass returns; the last layer's
            is taken before the final norm (`models.hidden_states`).
        ids: [V], the tokens whose logits are wanted; None: all.

    Attributes:
        by_row: Whether attention is computed row by row.
        flat: Whether the padding of branches costs nothing: trees may have different sizes.
    """

    def __init__(
        self,
        network: PreTrainedModel,
        predicate: Predicate,
        capacity: int,
        hidden_layers: tuple[int, ...] = (),
        ids: Tensor | None = None,
    ):
        super().__init__(network)
        self._logits = ReducedHead(network, ids)
        self.hidden_layers = hidden_layers
        self.predicate = predicate
        config = network.config.get_text_config()
        on = layers_by_device(network)
        self.cache: RaggedCache = RaggedCache(capacity, config.num_hidden_layers, on)
        self._several = len(on) > 1
        kind = config._attn_implementation
        # XLNet has its own masks, which its wrapper makes of bool ones.
        adds = kind == GROUPED or (kind == EAGER and isinstance(network, PreTrainedModel))
        self._adds = network.dtype if adds else None
        # bfloat16 sums round by their width, so no row's width may depend on the longest row.
        self.by_row = kind == GROUPED and network.dtype == torch.bfloat16
        self.flat = self.by_row and is_fused(network)
        self._windows = windows_of(config)
        self._slots = torch.arange(capacity, device=input_device(network))[None]
        self._clean = Layout(*self._slots.new_tensor([0, 0, -1])[:, None, None])
        self._known = config.vocab_size
        self._cache_key = cache_argument(network)

    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        keep: int,
        block_start: Tensor | None = None,
        padding: Tensor | None = None,
        branch: Tensor | None = None,
    ) -> TargetOutput:
        """Run new tokens over the cache.

        Args:
            tokens, positions: [B, Q]; a token's key and value go to slot `position`.
            keep: Return the logits of the last `keep` tokens.
            block_start: [B]; tokens and slots from there on are one draft block; None: all are
                clean.
            padding: bool [B, Q]; these tokens go to the scratch slot, or nowhere (`flat`).
            branch: [B, Q], -1 outside of any. Branches share positions, so tokens go to consecutive
                slots from the first token's position on.
        """
        slots = positions
        if branch is not None:
            slots = positions[:, :1] + self._slots[:, : tokens.shape[1]]
        visible = int(slots[:, -1].max()) + 1
        q = self._layout(positions, block_start)
        k = self._layout(self._slots[:, :visible], block_start)
        if branch is not None:
            q, k = _branched(q, k, slots, branch)
        if len(slots) > 1:
            # A row's slots after its last token are stale: another row may reach further.
            stale = self._slots[:, :visible] > slots[:, -1:]
            k = k._replace(document=-stale.long())
        mask = self.masks(q, k, visible)
        if padding is not None and branch is not None and self.flat:
            return self._flat_pass(tokens, positions, slots, mask, ~padding)
        spans = _spans(slots, padding) if self.by_row else None
        if padding is not None:
            slots = slots.masked_fill(padding, self.cache.capacity - 1)
        return self.run(tokens, positions, slots, mask, keep, spans)

    def masks(
        self, q: Layout, k: Layout, tokens: int, allowed: Tensor | None = None
    ) -> Tensor | dict[str, Tensor]:
        """Return the mask of queries [B, Q] over the first slots [B, K], or one by type of layer.

        `tokens` is the length of the longest text, which no window limits that it fits into; where
        `allowed` [B, 1, Q, K] is False, keys are hidden whatever the pattern is.
        """

        def make(limit: Predicate | None) -> Tensor:
            mask = dense(limited(self.predicate, limit), q, k)
            if allowed is not None:
                mask &= allowed
            # Else every layer would turn it into numbers.
            return mask if self._adds is None else additive(mask, self._adds)

        if self._windows is None or tokens <= self._windows.narrowest:
            return make(None)
        return self._windows.masks(make)

    def keep_path(self, lengths: Tensor, node: Tensor) -> None:
        """Move the nodes [B, m] of a tree to the front of it, after the first lengths [B] slots."""
        steps = self._slots[:, : node.shape[1]]
        if (node != steps).any():
            self.cache.move(lengths[:, None] + node, lengths[:, None] + steps)

    def run(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        mask: Tensor | dict[str, Tensor],
        keep: int | Tensor,
        spans: Sequence[Span] | None = None,
        flat: Tensor | None = None,
    ) -> TargetOutput:
        """Run tokens at positions, written to slots, under `masks` over the first slots.

        `keep` is the number of last tokens whose logits are returned, or their indices; `spans` are
        those of `models.attention.grouped`. With `flat` (`RaggedCache.place`) all but the slots is
        of the tokens as one row.
        """
        one = mask if isinstance(mask, Tensor) else next(iter(mask.values()))
        self.cache.place(slots, one.shape[-1], flat)
        if self._several:  # the head may have another device
            keep = keep if isinstance(keep, int) else keep.cpu()
        elif isinstance(keep, int):
            keep = self._slots[0, tokens.shape[1] - keep : tokens.shape[1]]
        with capture(self.network, self.hidden_layers) as states, self.counted():
            logits = self._logits(
                # A drafter's vocabulary may be the smaller one: it only guesses, any token will do.
                input_ids=tokens.clamp_max(self._known - 1),
                attention_mask=mask,
                position_ids=clamped(positions, self._range),
                **{self._cache_key: self.cache},
                use_cache=True,
                # As indices, which copy: on a view of a longer row the CPU's bfloat16 product with
                # the head is five times slower.
                logits_to_keep=keep,
                **({} if spans is None else {"spans": spans}),
            )
        return TargetOutput(logits, tuple(state.to(tokens.device) for state in states))

    def _flat_pass(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        mask: Tensor | dict[str, Tensor],
        real: Tensor,
    ) -> TargetOutput:
        """Run the `real` tokens of [B, Q] as one row; others have any outputs."""

        def joined(mask: Tensor) -> Tensor:
            return mask[:, 0][real][None, None]

        own = joined(mask) if isinstance(mask, Tensor) else {t: joined(m) for t, m in mask.items()}
        every, rows = torch.arange(int(real.sum())), torch.zeros_like(tokens)
        rows[real] = every
        given = tokens[real][None], positions[real][None], slots, own, every
        logits, states = self.run(*given, flat=real)
        return TargetOutput(logits[0][rows], tuple(state[0][rows] for state in states))

    def _layout(self, positions: Tensor, block_start: Tensor | None) -> Layout:
        # Expanded to the positions' shape, as a predicate need not read the index.
        clean = self._clean.map(lambda t: t.expand_as(positions))._replace(index=positions)
        if block_start is None:
            return clean
        start = block_start[:, None]
        index, block = positions.minimum(start), -(positions < start).long()
        return clean._replace(index=index, block=block, position=positions)


def _spans(slots: Tensor, padding: Tensor | None) -> list[Span]:
    """Return each row's unpadded tokens, which are neighbours, with the slots that they read."""
    padding = torch.zeros_like(slots, dtype=torch.bool) if padding is None else padding
    first, count = padding.int().argmin(1), (~padding).sum(1)
    last = (first + count - 1)[:, None]
    ends = (slots.gather(1, last.clamp_min(0))[:, 0] + 1) * (count > 0)
    rows = enumerate(zip(first.tolist(), (first + count).tolist(), ends.tolist()))
    return [Span(b, slice(start, stop), (slice(end),)) for b, (start, stop, end) in rows if end]


def _branched(q: Layout, k: Layout, slots: Tensor, branch: Tensor) -> tuple[Layout, Layout]:
    """Return the layouts of a pass whose tokens, at these slots, are in branches [B, Q]."""
    index = k.index.expand(len(slots), -1).scatter(1, slots, q.index)
    block = torch.full_like(index, -1).scatter(1, slots, branch)
    return q._replace(block=branch), Layout(k.document, index, block)
