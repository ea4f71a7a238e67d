"""MAR's own sampler: several tokens a pass, in a random order (arXiv 2406.11838, section 3.4).

The tokens of one pass are drawn independently, given all tokens before them, so their number
changes the distribution: with fewer passes than tokens it is not that of sequential decoding. With
as many it is, and that distribution is what `decoding.samplers.cspd` keeps.
"""

import math
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from decoding.continuous import prefixes
from decoding.continuous.image_state import ImageBatch, ImageParams, ImageResult
from decoding.continuous.prefixes import CHAIN
from decoding.engine.randomness import ContinuousRandomness, fresh_seed
from decoding.samplers.sequential import SequentialSampler
from models.mar import MarTransformer

NUMBERS = ("keyed", "published")
KNOBS = {"iterations": int, "numbers": str, **CHAIN}


class PublishedRandomness(ContinuousRandomness):
    """The random numbers of MAR's program, for images that are generated as one batch.

    The program draws orders from NumPy's global generator, and each pass's x_T from the CPU's
    generator of torch and the noise from the device's; with guidance it draws noise for the rows
    without a class too, and ignores it. Seeded as in its demonstration, before sampling.

    Args:
        seed: Of all generators.
        device: Where the model runs.
        steps: Denoising steps, T.
        guided: Whether there is guidance.
    """

    def __init__(self, seed: int, device: torch.device, steps: int, guided: bool):
        self.shuffles = np.random.RandomState(seed)
        self.starts = self.noise = torch.Generator().manual_seed(seed)
        if device.type != "cpu":
            self.noise = torch.Generator(device).manual_seed(seed)
        self.steps, self.guided, self.draws = steps, guided, 0

    def orders(self, count: int, tokens: int) -> Tensor:
        """Orders in which the tokens are masked, [count, tokens]: the last is generated first."""
        rows = np.tile(np.arange(tokens), (count, 1))
        for row in rows:
            self.shuffles.shuffle(row)
        return torch.from_numpy(rows).to(self.noise.device)

    def normal(self, shape: tuple[int, ...]) -> Tensor:
        count, start = math.prod(shape[:-1]), self.draws % (self.steps + 1) == 0
        self.draws += 1
        source = self.starts if start else self.noise
        drawn = count * (2 if self.guided and not start else 1)
        numbers = torch.randn(drawn, shape[-1], generator=source, device=source.device)
        return numbers[:count].view(shape).to(self.noise.device, torch.float64)


class MarSampler(SequentialSampler):
    """MAR's own sampler of images.

    Args:
        target: The MAR.
        iterations: Passes an image; with as many as there are tokens, each pass makes one. None is
            the program's default of 64, or fewer where there are fewer tokens.
        numbers: 'keyed': an image depends on its own seed only; 'published': the random numbers of
            MAR's program, where a batch has one seed (`PublishedRandomness`).

    Raises:
        ValueError: Another network, or a value that is not allowed.
    """

    def __init__(
        self, target: MarTransformer, *, iterations: int | None = None, numbers: str = "keyed"
    ):
        super().__init__(target)
        if not isinstance(target, MarTransformer):
            raise ValueError("method=mar is for MAR's checkpoints: use method=sequential")
        if numbers not in NUMBERS:
            raise ValueError(f"unknown numbers {numbers!r}. Choose from {list(NUMBERS)}")
        N = target.config.tokens
        iterations = min(64, N) if iterations is None else iterations
        if not 1 <= iterations <= N:
            raise ValueError(
                f"iterations={iterations} is not allowed: an image has {N} tokens, and each pass "
                "makes at least 1"
            )
        self.published = numbers == "published"
        known = known_after(N, iterations)
        self.counts = [b - a for a, b in pairwise([0, *known])]
        self.after = torch.zeros(N + 1, dtype=torch.long, device=target.device)  # by tokens before
        self.after[[0, *known[:-1]]] = self.after.new_tensor(known)

    def generate(
        self,
        labels: list[int],
        params: ImageParams | None = None,
        *,
        seeds: list[int] | None = None,
        randomness: ContinuousRandomness | None = None,
        at_once: int | None = None,
    ) -> list[ImageResult]:
        if not self.published or randomness is not None:
            return super().generate(
                labels, params, seeds=seeds, randomness=randomness, at_once=at_once
            )
        if seeds is not None:
            raise ValueError("numbers=published has one seed for all images, that of the params")
        params = params or ImageParams()
        seed = fresh_seed() % 2**32 if params.seed is None else params.seed
        if not 0 <= seed < 2**32:
            raise ValueError(f"seed={seed} is not allowed: numbers=published needs 0 to 2^32 - 1")
        steps, guided = self.target.head.steps, params.guidance != 1
        randomness = PublishedRandomness(seed, self.target.device, steps, guided)
        size = max(1, at_once or len(labels))
        batches = [labels[i : i + size] for i in range(0, len(labels), size)] or [labels]
        results = []
        for batch in batches:  # one after the other: the generators go on
            results += super().generate(batch, params, randomness=randomness, at_once=at_once)
        return results

    def order(self, count: int, randomness: ContinuousRandomness) -> Tensor:
        """Orders of generation [count, N]; the tokens of one pass are in raster order."""
        if isinstance(randomness, PublishedRandomness):
            order = randomness.orders(count, self.target.config.tokens).flip(-1)
        else:
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
    """Tokens that are known after each pass: the cosine schedule of MaskGIT (arXiv 2202.04200).

    Args:
        tokens: N.
        iterations: Passes, 1 to N.

    >>> known_after(8, 3)
    [2, 4, 8]
    """
    left, known = tokens, []
    for i in range(1, iterations):
        left = max(1, min(left - 1, math.floor(tokens * math.cos(math.pi / 2 * i / iterations))))
        known.append(tokens - left)
    return [*known, tokens]


def load(path: str, config: dict, *, target: str | None, dtype: str, device: str) -> MarSampler:
    """The sampler of a MAR.

    Args:
        path: A file of `models.mar.CHECKPOINTS`, or a folder.
        config: Its `parade` entry.
        target: None: this sampler has no drafter.
        dtype: Of the weights.
        device: Where to run.

    Raises:
        ValueError: A target is given, or the model cannot be loaded.
    """
    if target is not None:
        raise ValueError(
            f"method=mar has no drafter, so target={target!r} is not used: give the target as "
            "model=, or 'sampler=[method=cspd,gamma=4,noisy_last=true]'"
        )
    knobs = {knob: config[knob] for knob in ("iterations", "numbers") if knob in config}
    return MarSampler(prefixes.load(path, config, dtype, device), **knobs)
