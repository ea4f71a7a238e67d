"""Sequential decoding of continuous tokens: the baseline of speculative decoding."""

import time
from collections import deque
from dataclasses import replace

import torch
from torch import Tensor

from decoding.continuous import prefixes
from decoding.continuous.denoising_chains import Step, run_chain
from decoding.continuous.image_state import (
    ImageBatch,
    ImageParams,
    ImageResult,
    PatchNetwork,
    guidance_scale,
)
from decoding.continuous.prefixes import CHAIN, ImageTransformer, PrefixNetwork
from decoding.engine.params import Stats
from decoding.engine.randomness import (
    ContinuousRandomness,
    KeyedRandomness,
    fresh_seed,
    request_seeds,
)
from decoding.method import Method
from models.mar import MarTransformer

Waiting = tuple[int, tuple[int, int]]  # an image that waits: its number, and its class and seed


class SequentialSampler:
    """Sampler of images, patch transformers' or MARs': one target pass per token."""

    continues = False  # it continues no text, so benchmarks of text refuse it
    bench = "decoding.bench.images"
    prefill = 0.0  # share of the tokens without drafts, where a request gives none

    def __init__(self, target: ImageTransformer):
        self.target = target.eval()

    def generate(
        self,
        labels: list[int],
        params: ImageParams | None = None,
        *,
        seeds: list[int] | None = None,
        randomness: ContinuousRandomness | None = None,
        at_once: int | None = None,
    ) -> list[ImageResult]:
        """Generate one image for each label.

        Args:
            labels: The class of each image.
            params: How to sample.
            seeds: One seed for each image; None derives them from params.seed.
            randomness: Replaces the keyed randomness of a single batch, for tests.
            at_once: Rows of a batch; None is all. A finished row is refilled with the next image
                (with `params.prefill`, a finished batch with the next batch), which changes no
                image.

        Raises:
            ValueError: A class is unknown, a number is out of range, or the model diverged.
        """
        params, classes = params or ImageParams(), self.target.config.classes
        if not labels:
            raise ValueError("no class was given")
        if bad := [c for c in labels if not 0 <= c < classes]:
            raise ValueError(f"class {bad[0]} is unknown: choose from 0 to {classes - 1}")
        if at_once is not None and at_once < 1:
            raise ValueError(f"a batch of {at_once} images is not allowed: it must have at least 1")
        if seeds is None:
            seeds = request_seeds(fresh_seed() if params.seed is None else params.seed, len(labels))
        if len(seeds) != len(labels):
            raise ValueError(f"{len(seeds)} seeds were given for {len(labels)} classes")
        if params.prefill is None:
            params = replace(params, prefill=self.prefill)
        at_once = at_once or len(labels)
        assert randomness is None or at_once >= len(labels)
        # All rows of a batch are prefilled in the same passes.
        size, results = at_once if params.prefill else len(labels), []
        with torch.inference_mode():
            for start in range(0, len(labels), size):
                part = slice(start, start + size)
                waiting = deque(enumerate(zip(labels[part], seeds[part])))
                results += self._decode(waiting, at_once, params, randomness)
        return results

    def _decode(
        self,
        waiting: deque[Waiting],
        at_once: int,
        params: ImageParams,
        randomness: ContinuousRandomness | None,
    ) -> list[ImageResult]:
        """Return the results of the waiting images, in order."""
        N, images = self.target.config.tokens, len(waiting)
        results: dict[int, ImageResult] = {}
        emitted: list[list[int]] = [[] for _ in waiting]
        batch = self.new_batch(waiting, at_once, params, randomness)
        self.begin(batch, params)
        began = dict.fromkeys(batch.requests, self._spent(batch))
        while batch.requests:
            tokens, counts, accepted = self.cycle(batch, params)
            if not tokens.isfinite().all():
                raise ValueError(
                    "the model's output is not finite: its weights are damaged or training diverged"
                )
            counts = counts.minimum(N - batch.lengths)
            batch.append(tokens, counts, accepted)
            for number, count in zip(batch.requests, counts.tolist()):
                emitted[number].append(count)
            done = (batch.lengths == N).nonzero().flatten().tolist()
            for b in done:
                number = batch.requests[b]
                spent = self._spent(batch) - began[number]
                results[number] = self._result(batch, b, spent, emitted[number])
            if done and waiting:
                fresh = self.new_batch(waiting, len(done), params)
                batch.replace(done[: len(fresh.requests)], fresh)
                began |= dict.fromkeys(fresh.requests, self._spent(batch))
                done = done[len(fresh.requests) :]
            if done:
                keep = [b for b in range(len(batch.requests)) if b not in done]
                batch.select(keep) if keep else batch.requests.clear()
        return [results[n] for n in range(images)]

    def new_batch(
        self,
        waiting: deque[Waiting],
        most: int,
        params: ImageParams,
        randomness: ContinuousRandomness | None = None,
    ) -> ImageBatch:
        """Take at most `most` images from the queue and make a batch of them."""
        taken = [waiting.popleft() for _ in range(min(most, len(waiting)))]
        device, config = self.target.device, self.target.config
        randomness = randomness or KeyedRandomness([seed for _, (_, seed) in taken], device)
        order = self.order(len(taken), randomness)
        label = torch.tensor([label for _, (label, _) in taken], device=device)
        shape = len(taken), config.tokens + self.margin(params), config.dim
        patches = torch.zeros(shape, dtype=self.target.dtype, device=device)
        return ImageBatch(label, order, patches, randomness, [number for number, _ in taken])

    def order(self, count: int, randomness: ContinuousRandomness) -> Tensor:
        """Return orders of generation [count, N], raster or random, as the model was trained."""
        N = self.target.config.tokens
        if self.target.config.order == "random":
            return randomness.normal((count, N)).argsort(-1)
        return torch.arange(N, device=self.target.device).expand(count, N)

    def margin(self, params: ImageParams) -> int:
        """Return how many slots a cycle may write beyond the last token."""
        return 1

    def begin(self, batch: ImageBatch, params: ImageParams) -> None:
        """Give the batch its networks."""
        batch.networks["target"] = self.cached(self.target, batch, params)

    def cycle(self, batch: ImageBatch, params: ImageParams) -> tuple[Tensor, Tensor, Tensor]:
        """Run one target pass: tokens [B, m, D], counts to emit [B], and accepted drafts [B, m]."""
        index = batch.lengths[:, None]
        x = self.run(batch, self.step("target", batch, index, params), index)
        return x, torch.ones_like(batch.lengths), torch.zeros_like(index, dtype=torch.bool)

    def run(self, batch: ImageBatch, step: Step, index: Tensor) -> Tensor:
        """Run the target's chains of the tokens at index [B, n] to x_0 [B, n, D]."""
        start = batch.randomness.normal((*index.shape, self.target.config.dim)).to(batch.patches)
        return run_chain(step, start, self.target.head.steps, batch.randomness).states[-1]

    def cached(
        self, network: ImageTransformer, batch: ImageBatch, params: ImageParams
    ) -> PatchNetwork | PrefixNetwork:
        """Return a network with, if it takes one, an empty cache for these images."""
        free = params.guidance != 1
        if isinstance(network, MarTransformer):
            return PrefixNetwork(network, free)
        return PatchNetwork(network, batch.order.shape[1] + 1, free)

    def step(
        self, name: str, batch: ImageBatch, index: Tensor, params: ImageParams, keep: int = 0
    ) -> Step:
        """Run network `name` on index [B, n]; return the densities of its denoising chains.

        `keep` is the number of last tokens whose chains are wanted; 0 is all.
        """
        network = batch.networks[name]
        return self.chain(network, network(batch, index, keep), index[:, -keep:], params)

    def chain(
        self,
        network: PatchNetwork | PrefixNetwork,
        hidden: tuple[Tensor, Tensor | None],
        index: Tensor,
        params: ImageParams,
    ) -> Step:
        """Return the densities [B, n] of denoising chains, given a network's states.

        `hidden` is z [B, n, H] with the class and without it (or None).
        """
        (z, free), guidance = hidden, None
        if free is not None:
            tokens = self.target.config.tokens
            guidance = free, guidance_scale(index, tokens, params, network.uncounted)

        def density(i: int, x: Tensor):
            return network.network.head.kernel(i, x, z, guidance).cooled(params.temperature)

        return density

    def _spent(self, batch: ImageBatch) -> Tensor:
        """Return seconds, then passes and seconds of target and of drafter, float64 [5]."""
        spent = [time.perf_counter(), 0, 0, 0, 0]
        for i, network in enumerate(batch.networks.values()):
            spent[1 + 2 * i : 3 + 2 * i] = network.passes, network.seconds
        return torch.tensor(spent, dtype=torch.float64)

    def _result(self, batch: ImageBatch, b: int, spent: Tensor, emitted: list[int]) -> ImageResult:
        order = batch.order[b, : self.target.config.tokens].argsort()
        patches, accepted = (x[b, : len(order)][order] for x in (batch.patches, batch.accepted))
        seconds, passes, target_s, drafts, drafter_s = spent.tolist()
        stats = Stats(emitted, target_passes=int(passes), drafter_passes=int(drafts))
        stats.target_s, stats.drafter_s = target_s, drafter_s
        stats.sampler_s = seconds - target_s - drafter_s
        return ImageResult(patches, int(batch.label[b]), accepted, stats)


def load(path: str, config: dict, *, target: str | None, dtype: str, device: str):
    """Load the sampler of an exported target, or of the target that an exported drafter names."""
    return SequentialSampler(prefixes.load(target or path, config, dtype, device))


METHOD = Method(SequentialSampler, keys=CHAIN, load=load)
