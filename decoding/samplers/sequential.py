"""Plain decoding of continuous tokens, one after the other: what speculation is held to."""

import time
from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor

from decoding.continuous.denoising_chains import Step, run_chain
from decoding.continuous.image_state import (
    ImageParams,
    ImageResult,
    PatchNetwork,
    PatchRows,
    guidance_scale,
)
from decoding.engine.params import Stats
from decoding.engine.randomness import (
    ContinuousRandomness,
    KeyedRandomness,
    fresh_seed,
    request_seeds,
)
from models import patches
from models.patches import PatchTransformer


class Wanted(NamedTuple):
    """An image that waits for a row of the batch. number: its place in the request."""

    number: int
    label: int
    seed: int


class SequentialSampler:
    """Images of a patch transformer; a batch of classes, one image each."""

    continues = False  # no text goes on: benches of texts refuse it
    bench = "decoding.bench.images"

    def __init__(self, target: PatchTransformer):
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
        """One image of each class.

        seeds: one a row; None derives them from params.seed. at_once: rows of a batch (None: all);
        a row that is done makes room for the next one, or, where tokens are pre-filled, a batch for
        the next batch. It changes no image. randomness: for tests, of one batch.
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
        at_once = at_once or len(labels)
        assert randomness is None or at_once >= len(labels)
        # All rows of a batch are pre-filled at the same time.
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
        """The images that wait, in their order."""
        N, results = self.target.config.tokens, [None] * len(waiting)
        emitted: list[list[int]] = [[] for _ in waiting]
        rows = self.rows(waiting, at_once, params, randomness)
        self.begin(rows, params)
        began = dict.fromkeys(rows.row, self._spent(rows))
        while rows.row:
            tokens, counts, accepted = self.cycle(rows, params)
            if not tokens.isfinite().all():
                raise ValueError("the model gives numbers that are not finite: it has diverged")
            counts = counts.minimum(N - rows.lengths)
            rows.append(tokens, counts, accepted)
            for row, count in zip(rows.row, counts.tolist()):
                emitted[row].append(count)
            done = (rows.lengths == N).nonzero().flatten().tolist()
            for b in done:
                spent = self._spent(rows) - began.pop(rows.row[b])
                results[rows.row[b]] = self._result(rows, b, spent, emitted[rows.row[b]])
            if done and waiting:
                fresh = self.rows(waiting, len(done), params)
                rows.replace(done[: len(fresh.row)], fresh)
                began |= dict.fromkeys(fresh.row, self._spent(rows))
                done = done[len(fresh.row) :]
            if done:
                keep = [b for b in range(len(rows.row)) if b not in done]
                rows.select(keep) if keep else rows.row.clear()
        return results

    def rows(
        self,
        waiting: deque[Wanted],
        most: int,
        params: ImageParams,
        randomness: ContinuousRandomness | None = None,
    ) -> PatchRows:
        """Rows of the first that wait, at most so many, which wait no longer."""
        taken = [waiting.popleft() for _ in range(min(most, len(waiting)))]
        device = self.target.device
        randomness = randomness or KeyedRandomness([w.seed for w in taken], device)
        order = self.order(len(taken), randomness)
        label = torch.tensor([w.label for w in taken], device=device)
        patches = self.empty(order, params)
        return PatchRows(label, order, patches, randomness, [w.number for w in taken])

    def order(self, count: int, randomness: ContinuousRandomness) -> Tensor:
        """Orders of generation [count, N], as the model was trained."""
        N = self.target.config.tokens
        if self.target.config.order == "random":
            return randomness.normal((count, N)).argsort(-1)
        return torch.arange(N, device=self.target.device).expand(count, N)

    def empty(self, order: Tensor, params: ImageParams) -> Tensor:
        """Room for the patches of all places: [B, N + margin, D]."""
        B, N = order.shape
        shape = (B, N + self.margin(params), self.target.config.dim)
        return torch.zeros(shape, dtype=self.target.dtype, device=order.device)

    def margin(self, params: ImageParams) -> int:
        """Places that a cycle may reach beyond the last token."""
        return 1

    def begin(self, rows: PatchRows, params: ImageParams) -> None:
        """Make the caches."""
        rows.networks["target"] = self.cached(self.target, rows, params)

    def cycle(self, rows: PatchRows, params: ImageParams) -> tuple[Tensor, Tensor, Tensor]:
        """One target pass: tokens [B, m, D], how many stand [B], which are the draft's [B, m]."""
        index = rows.lengths[:, None]
        step = self.step("target", rows, index, params)
        start = rows.randomness.normal((*index.shape, self.target.config.dim)).to(rows.patches)
        x = run_chain(step, start, self.target.head.steps, rows.randomness).states[-1]
        return x, torch.ones_like(rows.lengths), torch.zeros_like(index, dtype=torch.bool)

    def cached(
        self, network: PatchTransformer, rows: PatchRows, params: ImageParams
    ) -> PatchNetwork:
        """A network with a cache that fits these rows."""
        return PatchNetwork(network, rows.order.shape[1] + 1, params.guidance != 1)

    def step(
        self, name: str, rows: PatchRows, index: Tensor, params: ImageParams, keep: int = 0
    ) -> Step:
        """A pass at places index [B, n], and the chain's densities at the last `keep` (0: all)."""
        network = rows.networks[name]
        z, free = (None if t is None else t[:, -keep:] for t in network(rows, index))
        guidance = None
        if free is not None:
            scale = guidance_scale(index[:, -keep:], self.target.config.tokens, params)
            guidance = (free, scale)
        head = network.network.head

        def density(i: int, x: Tensor):
            return head.kernel(i, x, z, guidance).cooled(params.temperature)

        return density

    def _spent(self, rows: PatchRows) -> Tensor:
        """Now: seconds, passes and seconds of the target, passes and seconds of the drafter [5]."""
        spent = [time.perf_counter()]
        for network in (rows.networks["target"], rows.networks.get("drafter")):
            spent += [network.passes, network.seconds] if network else [0, 0]
        return torch.tensor(spent, dtype=torch.float64)

    def _result(self, rows: PatchRows, b: int, spent: Tensor, emitted: list[int]) -> ImageResult:
        order = rows.order[b, : self.target.config.tokens].argsort()
        patches, accepted = (x[b, : len(order)][order] for x in (rows.patches, rows.accepted))
        seconds, passes, target_s, drafts, drafter_s = spent.tolist()
        stats = Stats(
            emitted=emitted,
            target_passes=int(passes),
            target_s=target_s,
            drafter_passes=int(drafts),
            drafter_s=drafter_s,
            sampler_s=seconds - target_s - drafter_s,
        )
        return ImageResult(patches, int(rows.label[b]), accepted, stats)


def load(path: str, config: dict, *, target: str | None, dtype: str, device: str):
    """The sampler of an exported target (see `decoding.load`), or of the one a drafter names."""
    return SequentialSampler(patches.load(target or path, dtype).to(device))
