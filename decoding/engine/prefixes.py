"""Prefix reuse: the keys and values of texts that have ended, for prompts that begin alike.

A chat's next turn begins with its last one, and an agent's prompts with the same instructions. Such
a prompt is read from where it differs. A token's keys and values depend on the tokens before it
alone, so the text that follows is the same.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from transformers import PreTrainedModel

from decoding.engine.cache import CachedNetwork, Stored

SHORTEST = 32  # tokens in common for which a prompt is prefilled by itself


class Kept(NamedTuple):
    """A text's tokens, and the keys and values of its first `length` in one network's layers."""

    tokens: list[int]
    length: int
    stored: Stored


class Prefixes:
    """Keys and values of texts, the ones used last, within a number of bytes.

    Args:
        most: Bytes that they may take together.

    Attributes:
        reused: Tokens of prompts that were not read again, so far.
    """

    def __init__(self, most: int):
        self.most, self.size, self.reused = most, 0, 0
        # The network of each, and the text; those used last come last.
        self._kept: OrderedDict[int, tuple[int, Kept]] = OrderedDict()
        self._number = 0

    def common(self, network: PreTrainedModel, tokens: Sequence[int]) -> int:
        """Return how many first tokens of a text a network need not read: 0, or SHORTEST on."""
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
        self.reused += count
        return count

    def keep(self, network: CachedNetwork, row: int, tokens: list[int], length: int) -> None:
        """Keep the first `length` tokens' keys and values of a row that ends."""
        if length < SHORTEST:
            return
        key = id(network.network)
        for number, (of, known) in [*self._kept.items()]:
            if of == key and known.tokens[: known.length] == tokens[: known.length]:
                if known.length >= length:
                    return  # the longer one is there already
                self._drop(number)
            elif of == key and known.length >= length and known.tokens[:length] == tokens[:length]:
                return
        stored = network.cache.store(row, length)
        self.size += stored.size
        self._kept[self._number] = key, Kept(tokens[:length], length, stored)
        self._number += 1
        while self.size > self.most:
            self._drop(next(iter(self._kept)))

    def _drop(self, number: int) -> None:
        self.size -= self._kept.pop(number)[1].stored.size

    def _longest(self, network: PreTrainedModel, tokens: Sequence[int]) -> tuple[int, int] | None:
        key, best = id(network), None
        for number, (of, known) in self._kept.items():
            if of == key:
                count = alike(known.tokens, tokens)
                if count >= SHORTEST and (best is None or count >= best[0]):
                    best = count, number
        return best


def alike(a: Sequence[int], b: Sequence[int]) -> int:
    """Return how many first tokens two texts have in common.

    >>> alike([1, 2, 3], [1, 2, 4, 3])
    2
    """
    most = min(len(a), len(b))
    return next((i for i in range(most) if a[i] != b[i]), most)
