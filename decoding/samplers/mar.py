"""MAR's own sampler: several tokens a pass, in a random order (arXiv 2406.11838, section 3.4).

The tokens of one pass are drawn independently given all tokens before them, so their number changes
the distribution: only one token a pass gives that of sequential decoding, which
`decoding.samplers.cspd` keeps.
"""

import math
from itertools import pairwise

import torch
from torch import Tensor

from decoding.continuous import prefixes
from decoding.continuous.image_state import ImageBatch, ImageParams
from decoding.continuous.prefixes import CHAIN
from decoding.engine.randomness import ContinuousRandomness
from decoding.method import Count, Method
from decoding.samplers.sequential import SequentialSampler
from models.mar import MarTransformer


class MarSampler(SequentialSampler):
    """MAR's own sampler of images.

    Args:
        target: The MAR.
        iterations: Passes an image; with as many as there are tokens, each pass makes one. None is
            the program's default of 64, or fewer where there are fewer tokens.

    Raises:
        ValueError: Another network, or a value that is not allowed.
    """

    def __init__(self, target: MarTransformer, *, iterations: Count | None = None):
        super().__init__(target)
        if not isinstance(target, MarTransformer):
            raise ValueError("method=mar is for MAR's checkpoints: use method=sequential")
        N = target.config.tokens
        iterations = min(64, N) if iterations is None else iterations
        if not 1 <= iterations <= N:
            raise ValueError(
                f"iterations={iterations} is not allowed: an image has {N} tokens, and each pass "
                "makes at least 1"
            )
        known = known_after(N, iterations)
        self.counts = [b - a for a, b in pairwise([0, *known])]
        self.after = torch.zeros(N + 1, dtype=torch.long, device=target.device)  # by tokens before
        self.after[[0, *known[:-1]]] = self.after.new_tensor(known)

    def order(self, count: int, randomness: ContinuousRandomness) -> Tensor:
        """Return orders of generation [count, N]; the tokens of one pass are in raster order."""
        order = super().order(count, randomness)
        return torch.cat([part.sort(-1).values for part in order.split(self.counts, -1)], -1)

    def margin(self, params: ImageParams) -> int:
        return max(self.counts)

    def cycle(self, batch: ImageBatch, params: ImageParams) -> tuple[Tensor, Tensor, Tensor]:
        n, after = batch.lengths[:, None], self.after[batch.lengths][:, None]
        counts = (after - n)[:, 0]
        index = n + torch.arange(int(counts.max()), device=n.device)
        network = batch.networks["target"]
        z, free = network.evaluate(batch, n, index[:, None])
        hidden = z[:, 0], None if free is None else free[:, 0]
        # The scale of guidance is one for a pass: that of its last token.
        step = self.chain(network, hidden, (after - 1).expand_as(index), params)
        return self.run(batch, step, index), counts, torch.zeros_like(index, dtype=torch.bool)


def known_after(tokens: int, iterations: int) -> list[int]:
    """Return how many of N tokens are known after each pass (MaskGIT's cosine, 2202.04200).

    >>> known_after(8, 3)
    [2, 4, 8]
    """
    left, known = tokens, []
    for i in range(1, iterations):
        left = max(1, min(left - 1, math.floor(tokens * math.cos(math.pi / 2 * i / iterations))))
        known.append(tokens - left)
    return [*known, tokens]


def load(path: str, config: dict, *, target: str | None, dtype: str, device: str) -> MarSampler:
    """Load the sampler of a MAR, a file of `models.mar.CHECKPOINTS` or a folder."""
    if target is not None:
        raise ValueError(
            f"method=mar has no drafter, so target={target!r} is not used: give the target as "
            "model=, or 'sampler=[method=cspd,gamma=4,noisy_last=true]'"
        )
    network = prefixes.load(path, config, dtype, device)
    return MarSampler(network, iterations=config.get("iterations"))


METHOD = Method(MarSampler, keys=CHAIN, load=load)
