"""Prefix reuse: the keys and values of prompts that have been read, for those that begin alike.

A chat's next turn begins with its last one, and an agent's prompts with the same instructions. A
token's keys and values depend on the tokens before it alone. That the text is the same to the bit
in bfloat16 too, prompts are read in parts of equally many tokens, and whole parts are kept: the
passes that are left are those that would have been. Answers are not kept, as passes of other widths
have read them.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple
from weakref import ref

from transformers import PreTrainedModel

from decoding.engine.cache import CachedNetwork, Stored

PART = 128  # tokens: a pass of fewer costs nearly as much


class Kept(NamedTuple):
    """A prompt's first tokens, and their keys and values in one network's layers."""

    tokens: list[int]
    stored: Stored


class Prefixes:
    """Keys and values of prompts, the ones used last, within a number of bytes.

    Args:
        most: Bytes that they may take together.
        part: Tokens that a pass over prompts reads.

    Attributes:
        size: Bytes that they take.
    """

    def __init__(self, most: int, part: int = PART):
        self.most, self.part, self.size = most, part, 0
        # The network of each, and the text; those used last come last. A number such as `id` could
        # be another network's one day, where a server changes its drafter.
        self._kept: OrderedDict[int, tuple[ref[PreTrainedModel], Kept]] = OrderedDict()
        self._number = 0

    def common(self, network: PreTrainedModel, tokens: Sequence[int]) -> int:
        """Return how many first tokens of a text a network need not read, in whole parts."""
        found = self._longest(network, tokens)
        return 0 if found is None else found[0]

    def give(self, network: CachedNetwork, tokens: Sequence[int]) -> int:
        """Write what is known of a text into a network's empty cache of one row.

        Returns how many first tokens need not be read.
        """
        found = self._longest(network.network, tokens)
        if found is None:
            return 0
        count, number = found
        self._kept.move_to_end(number)
        network.cache.restore(self._kept[number][1].stored, count)
        return count

    def keep(self, network: CachedNetwork, row: int, tokens: list[int]) -> None:
        """Keep what a row of a network's cache has of a text, in whole parts."""
        tokens, key = tokens[: len(tokens) // self.part * self.part], ref(network.network)
        if not tokens:
            return
        for number, (of, known) in [*self._kept.items()]:
            if of() is None:
                self._drop(number)
            if of == key and known.tokens[: len(tokens)] == tokens:
                self._kept.move_to_end(number)
                return
            if of == key and tokens[: len(known.tokens)] == known.tokens:
                self._drop(number)
        stored = network.cache.store(row, len(tokens))
        self.size += stored.size
        self._kept[self._number] = key, Kept(tokens, stored)
        self._number += 1
        while self.size > self.most:
            self._drop(next(iter(self._kept)))

    def _drop(self, number: int) -> None:
        self.size -= self._kept.pop(number)[1].stored.size

    def _longest(self, network: PreTrainedModel, tokens: Sequence[int]) -> tuple[int, int] | None:
        key, best = ref(network), None
        for number, (of, known) in self._kept.items():
            if of == key:
                count = alike(known.tokens, tokens) // self.part * self.part
                if count and (best is None or count >= best[0]):
                    best = count, number
        return best


def alike(a: Sequence[int], b: Sequence[int]) -> int:
    """Return how many first tokens two texts have in common.

    >>> alike([1, 2, 3], [1, 2, 4, 3])
    2
    """
    most = min(len(a), len(b))
    return next((i for i in range(most) if a[i] != b[i]), most)
