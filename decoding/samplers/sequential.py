"""Sequential decoding of continuous tokens: the baseline of speculative decoding."""

import time
from collections import deque
from dataclasses import replace
from typing import NamedTuple

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
from decoding.continuous.prefixes import CHAIN, ImageTransformer, PrefixNetwork, in_decoding
from decoding.engine.params import Stats
from decoding.engine.randomness import (
    ContinuousRandomness,
    KeyedRandomness,
    fresh_seed,
    request_seeds,
)

KNOBS = CHAIN


class Wanted(NamedTuple):
    """An image that waits for a free row of the batch.

    Attributes:
        number: Its index in the call.
        label: Its class.
        seed: Its seed.
    """

    number: int
    label: int
    seed: int


class SequentialSampler:
    """Sampler of images: one target pass per token.

    Args:
        target: A patch transformer or a MAR.
    """

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
                (with `params.prefill`, a finished batch with the next batch). Images do not depend
                on it.

        Returns:
            One result for each label, in order.

        Raises:
            ValueError: A class is unknown, a number is out of range, or the model diverged.
        """
        params, config = params or ImageParams(), self.target.config
        bad = [c for c in labels if not 0 <= c < config.classes]
        if bad or not labels:
            raise ValueError(
                f"class {bad[0]} is unknown: choose from 0 to {config.classes - 1}"
                if bad
                else "no class was given"
            )
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
        step = at_once if params.prefill else len(labels)
        results = []
        with torch.inference_mode():
            for start in range(0, len(labels), step):
                pairs = zip(labels[start : start + step], seeds[start : start + step])
                waiting = deque(Wanted(i, *pair) for i, pair in enumerate(pairs))
                results += self._decode(waiting, at_once, params, randomness)
        return results

    def _decode(
        self,
        waiting: deque[Wanted],
        at_once: int,
        params: ImageParams,
        randomness: ContinuousRandomness | None,
    ) -> list[ImageResult]:
        """The results of the waiting images, in order."""
        N, results = self.target.config.tokens, [None] * len(waiting)
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
            for row, count in zip(batch.requests, counts.tolist()):
                emitted[row].append(count)
            done = (batch.lengths == N).nonzero().flatten().tolist()
            for b in done:
                spent = self._spent(batch) - began.pop(batch.requests[b])
                results[batch.requests[b]] = self._result(
                    batch, b, spent, emitted[batch.requests[b]]
                )
            if done and waiting:
                fresh = self.new_batch(waiting, len(done), params)
                batch.replace(done[: len(fresh.requests)], fresh)
                began |= dict.fromkeys(fresh.requests, self._spent(batch))
                done = done[len(fresh.requests) :]
            if done:
                keep = [b for b in range(len(batch.requests)) if b not in done]
                batch.select(keep) if keep else batch.requests.clear()
        return results

    def new_batch(
        self,
        waiting: deque[Wanted],
        most: int,
        params: ImageParams,
        randomness: ContinuousRandomness | None = None,
    ) -> ImageBatch:
        """Take at most `most` images from the queue and make a batch of them."""
        taken = [waiting.popleft() for _ in range(min(most, len(waiting)))]
        device = self.target.device
        randomness = randomness or KeyedRandomness([w.seed for w in taken], device)
        order = self.order(len(taken), randomness)
        label = torch.tensor([w.label for w in taken], device=device)
        patches = self.empty(order, params)
        return ImageBatch(label, order, patches, randomness, [w.number for w in taken])

    def order(self, count: int, randomness: ContinuousRandomness) -> Tensor:
        """Orders of generation [count, N], raster or random, as the model was trained."""
        N = self.target.config.tokens
        if self.target.config.order == "random":
            return randomness.normal((count, N)).argsort(-1)
        return torch.arange(N, device=self.target.device).expand(count, N)

    def empty(self, order: Tensor, params: ImageParams) -> Tensor:
        """Zeros for the patches of all positions: [B, N + margin, D]."""
        B, N = order.shape
        shape = (B, N + self.margin(params), self.target.config.dim)
        return torch.zeros(shape, dtype=self.target.dtype, device=order.device)

    def margin(self, params: ImageParams) -> int:
        """Slots that a cycle may write beyond the last token."""
        return 1

    def begin(self, batch: ImageBatch, params: ImageParams) -> None:
        """Make the networks' caches."""
        batch.networks["target"] = self.cached(self.target, batch, params)

    def cycle(self, batch: ImageBatch, params: ImageParams) -> tuple[Tensor, Tensor, Tensor]:
        """One target pass.

        Returns:
            tokens [B, m, D], how many of them are emitted [B], and which of those are accepted
            drafts, bool [B, m].
        """
        index = batch.lengths[:, None]
        x = self.run(batch, self.step("target", batch, index, params), index)
        return x, torch.ones_like(batch.lengths), torch.zeros_like(index, dtype=torch.bool)

    def run(self, batch: ImageBatch, step: Step, index: Tensor) -> Tensor:
        """Run the target's chains of the tokens at index [B, n]; returns x_0 [B, n, D]."""
        start = batch.randomness.normal((*index.shape, self.target.config.dim)).to(batch.patches)
        return run_chain(step, start, self.target.head.steps, batch.randomness).states[-1]

    def cached(
        self, network: ImageTransformer, batch: ImageBatch, params: ImageParams
    ) -> PatchNetwork | PrefixNetwork:
        """A network with, if it takes one, an empty cache that has room for these images."""
        return in_decoding(network, batch.order.shape[1] + 1, params.guidance != 1)

    def step(
        self, name: str, batch: ImageBatch, index: Tensor, params: ImageParams, keep: int = 0
    ) -> Step:
        """Run a network, and give the densities of its denoising chains.

        Args:
            name: 'target' or 'drafter'.
            batch: The unfinished requests.
            index: Indices into the order of generation, [B, n].
            params: Guidance and temperature.
            keep: Tokens, the last ones, whose chains are wanted; 0 is all.

        Returns:
            The density of each step of the chains, [B, keep].
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
        """The densities of denoising chains, given a network's states.

        Args:
            network: The network.
            hidden: Its states z [B, n, H] with the class, and without it (or None).
            index: Indices of the tokens into the order of generation, [B, n], for guidance.
            params: Guidance and temperature.

        Returns:
            The density of each step of the chains, [B, n].
        """
        z, free = hidden
        guidance = None
        if free is not None:
            tokens = self.target.config.tokens
            guidance = free, guidance_scale(index, tokens, params, network.uncounted)
        head = network.network.head

        def density(i: int, x: Tensor):
            return head.kernel(i, x, z, guidance).cooled(params.temperature)

        return density

    def _spent(self, batch: ImageBatch) -> Tensor:
        """Spent so far: seconds, then passes and seconds of target and of drafter, float64 [5]."""
        spent = [time.perf_counter()]
        for network in (batch.networks["target"], batch.networks.get("drafter")):
            spent += [network.passes, network.seconds] if network else [0, 0]
        return torch.tensor(spent, dtype=torch.float64)

    def _result(self, batch: ImageBatch, b: int, spent: Tensor, emitted: list[int]) -> ImageResult:
        order = batch.order[b, : self.target.config.tokens].argsort()
        patches, accepted = (x[b, : len(order)][order] for x in (batch.patches, batch.accepted))
        seconds, passes, target_s, drafts, drafter_s = spent.tolist()
        stats = Stats(
            emitted=emitted,
            target_passes=int(passes),
            target_s=target_s,
            drafter_passes=int(drafts),
            drafter_s=drafter_s,
            sampler_s=seconds - target_s - drafter_s,
        )
        return ImageResult(patches, int(batch.label[b]), accepted, stats)


def load(path: str, config: dict, *, target: str | None, dtype: str, device: str):
    """The sampler of an exported target, or of the target that an exported drafter names.

    Args:
        path: The export's folder.
        config: Its `parade` entry.
        target: Folder of the target if the export is a drafter.
        dtype: Of the weights.
        device: Where to run.
    """
    return SequentialSampler(prefixes.load(target or path, config, dtype, device))
