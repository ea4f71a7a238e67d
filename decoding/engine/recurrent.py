"""Networks with recurrent layers, in whose states a rejected draft leaves no trace.

Keys and values of a rejected draft are cut off; a recurrent state (gated delta net, Mamba-2, short
convolution) has taken it up for good. So a row keeps the states with which its last pass began. If
a draft was accepted whole, its next pass goes on from the states at its end. If not, the old ones
come back, and the next pass reads the tokens committed since and its own draft in one go.
"""

from collections.abc import Sequence
from copy import deepcopy

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, LinearAttentionCacheLayerMixin

from decoding.engine.cache import CachedNetwork, CountedNetwork, TargetOutput
from models.attention import cache_argument
from models.context import clamped
from models.head import ReducedHead
from models.hidden_states import capture
from models.masks import Predicate
from models.placement import input_device
from models.recurrent import is_recurrent

MOST_AGAIN = 16  # committed tokens that a pass reads again; more get a pass of their own
# What a recurrent layer of transformers' cache changes in a forward.
STATES = ("conv_states", "recurrent_states", "conv_kernel_size", "has_previous_state",
          "is_conv_states_initialized", "is_recurrent_states_initialized")  # fmt: skip


class Row:
    """The cache of one text, which can go back to where its last pass began.

    Attributes:
        tokens: Those that the cache has taken up, of which some may have been rejected since.
        begun: How many there were when the last pass began.
    """

    def __init__(self, network: PreTrainedModel):
        self.cache: Cache = DynamicCache(config=network.config)
        self.tokens: list[int] = []
        self.begun = 0
        self._states: list[dict] | None = None

    def begin(self) -> None:
        """Remember the states, as a pass begins."""
        self.begun = len(self.tokens)
        self._states = [
            {name: deepcopy(getattr(layer, name)) for name in STATES}
            if isinstance(layer, LinearAttentionCacheLayerMixin)
            else {}
            for layer in self.cache.layers
        ]

    def go_back(self) -> None:
        """Go back to where the last pass began; the next one must `begin` before it can be left."""
        assert self._states is not None
        for layer, states in zip(self.cache.layers, self._states):
            vars(layer).update(states)
            if isinstance(layer, DynamicLayer) and layer.is_initialized:
                layer.keys = layer.keys[..., : self.begun, :]
                layer.values = layer.values[..., : self.begun, :]
        del self.tokens[self.begun :]


class RowCaches:
    """The caches of a batch's texts, with what a batch asks of a cache.

    Attributes:
        expected: How many rows there will be at once, and the tokens of the longest prompt; their
            memory is made as they come.
    """

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.expected = (0, 0)

    @property
    def allocated(self) -> int:
        """Return the rows that there is memory for."""
        return len(self.rows)

    @property
    def nbytes(self) -> int:
        """Return the bytes of keys, values and states, without those that rows may go back to."""
        layers = [layer for row in [*self.rows] for layer in row.cache.layers]
        held = [value for layer in layers for value in [*vars(layer).values()]]
        flat = [x for h in held for x in (h.values() if isinstance(h, dict) else [h])]
        return sum(x.nbytes for x in flat if isinstance(x, Tensor))

    def trim(self, count: int) -> None:
        """Free the memory of all rows after the first `count`."""
        del self.rows[count:]

    def select(self, rows: Tensor) -> None:
        """Keep these rows, in this order."""
        self.rows = [self.rows[b] for b in rows.tolist()]

    def join(self, fresh: "RowCaches", count: int, new: int) -> None:
        """Append the `new` rows of another batch after the first `count`."""
        self.rows = self.rows[:count] + fresh.rows[:new]


class RecurrentNetwork(CountedNetwork):
    """A causal LM with recurrent layers; takes what `CachedNetwork` takes, but no trees.

    Rows run one after another: their states end at different tokens, and a padded token would enter
    them.

    Args:
        network: The model.
        hidden_layers: As in `CachedNetwork`.
    """

    def __init__(self, network: PreTrainedModel, hidden_layers: tuple[int, ...] = ()):
        super().__init__(network)
        self.cache: RowCaches = RowCaches()
        self.hidden_layers = hidden_layers
        self._cache_key = cache_argument(network)
        self._logits = ReducedHead(network, None)

    def __call__(
        self, tokens: Tensor, positions: Tensor, keep: int, padding: Tensor | None = None
    ) -> TargetOutput:
        """Run new tokens over the cache.

        Args:
            tokens, positions: [B, Q]; each row's follow each other, and the first one may follow
                any token after the last pass's first.
            keep: Return the logits of the last `keep` tokens.
            padding: bool [B, Q]; these tokens are left out.
        """
        while len(self.cache.rows) < len(tokens):
            self.cache.rows.append(Row(self.network))
        read = torch.ones_like(tokens, dtype=torch.bool) if padding is None else ~padding
        rows = [*zip(self.cache.rows, tokens, positions, read)]
        again = [self._rejected(row, at[mine]) for row, _, at, mine in rows]
        if any(len(committed) > MOST_AGAIN for committed in again):
            with self.counted():
                for (row, *_), committed in zip(rows, again):
                    if len(committed) > MOST_AGAIN:
                        self._forward(row, committed, 1)
                        committed.clear()
        with self.counted():
            outputs = [
                self._run(row, committed, ids[mine].tolist(), keep) if mine.any() else None
                for (row, ids, _, mine), committed in zip(rows, again)
            ]
        return _padded(outputs, read, keep)

    def _rejected(self, row: Row, positions: Tensor) -> list[int]:
        """Go back in a row before tokens that were rejected; return the others, to read again."""
        start = int(positions[0]) if len(positions) else len(row.tokens)
        if start == len(row.tokens):
            return []
        assert row.begun <= start < len(row.tokens)
        committed = row.tokens[row.begun : start]
        row.go_back()
        return committed

    def _run(self, row: Row, again: list[int], new: list[int], keep: int) -> TargetOutput:
        """Run a row's new tokens, after those to read `again`."""
        row.begin()
        found = self._forward(row, [*again, *new], min(keep, len(new)))
        states = tuple(state[:, len(again) :] for state in found.hidden_states)
        return TargetOutput(found.logits, states)

    def _forward(self, row: Row, tokens: Sequence[int], keep: int) -> TargetOutput:
        """Run tokens after those of the row's cache."""
        device = input_device(self.network)
        ids = torch.tensor([[*tokens]], device=device)
        positions = torch.arange(len(row.tokens), len(row.tokens) + len(tokens), device=device)
        with capture(self.network, self.hidden_layers) as states:
            logits = self._logits(
                input_ids=ids,
                position_ids=clamped(positions[None], self._range),
                **{self._cache_key: row.cache},
                use_cache=True,
                logits_to_keep=keep,
            )
        row.tokens += tokens
        return TargetOutput(logits, tuple(state.to(device) for state in states))


def cached(
    target: PreTrainedModel,
    predicate: Predicate,
    capacity: int,
    hidden_layers: tuple[int, ...] = (),
) -> CachedNetwork | RecurrentNetwork:
    """Return a target with the cache that its layers need; the arguments are `CachedNetwork`'s."""
    if is_recurrent(target.config):
        return RecurrentNetwork(target, hidden_layers)
    return CachedNetwork(target, predicate, capacity, hidden_layers)


def _padded(outputs: Sequence[TargetOutput | None], read: Tensor, keep: int) -> TargetOutput:
    """Join rows' outputs, each at its own tokens [B, Q]; zeros elsewhere."""
    one = next(output for output in outputs if output is not None)
    kept = read[:, -keep:]
    logits = one.logits.new_zeros(*kept.shape, one.logits.shape[-1])
    states = [s.new_zeros(*read.shape, s.shape[-1]) for s in one.hidden_states]
    for b, output in enumerate(outputs):
        if output is None:
            continue
        count = int(kept[b].sum())
        logits[b, kept[b]] = output.logits[0, output.logits.shape[1] - count :]
        for whole, own in zip(states, output.hidden_states):
            whole[b, read[b]] = own[0]
    return TargetOutput(logits, tuple(states))
