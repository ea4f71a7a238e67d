"""Plain decoding of continuous tokens, one after the other: what speculation is held to."""

import time

import torch
from torch import Tensor

from decoding.chains import Step, run_chain
from decoding.params import Stats
from decoding.patches import ImageParams, ImageResult, PatchNetwork, PatchRows, guidance_scale
from decoding.randomness import ContinuousRandomness, KeyedRandomness, fresh_seed
from models import patches
from models.patches import PatchTransformer


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
    ) -> list[ImageResult]:
        """One image of each class, as one batch.

        seeds: one a row; by default params.seed + row. randomness: for tests.
        """
        params, config = params or ImageParams(), self.target.config
        bad = [c for c in labels if not 0 <= c < config.classes]
        if bad or not labels:
            raise ValueError(
                f"class {bad[0]} is unknown: choose from 0 to {config.classes - 1}"
                if bad
                else "no class was given"
            )
        if seeds is None:
            first = fresh_seed() if params.seed is None else params.seed
            seeds = [first + b for b in range(len(labels))]
        device = self.target.device
        with torch.inference_mode():
            randomness = randomness or KeyedRandomness(seeds, device)
            order = self.order(len(labels), randomness)
            label = torch.tensor(labels, device=device)
            rows = PatchRows(label, order, self.empty(order, params), randomness)
            return self._decode(rows, params)

    def _decode(self, rows: PatchRows, params: ImageParams) -> list[ImageResult]:
        N, results = self.target.config.tokens, [None] * len(rows.row)
        emitted: list[list[int]] = [[] for _ in rows.row]
        started = time.perf_counter()
        self.begin(rows, params)
        while rows.row:
            tokens, counts, accepted = self.cycle(rows, params)
            if not tokens.isfinite().all():
                raise ValueError("the model gives numbers that are not finite: it has diverged")
            counts = counts.minimum(N - rows.lengths)
            rows.append(tokens, counts, accepted)
            keep = []
            for b, count in enumerate(counts.tolist()):
                emitted[rows.row[b]].append(count)
                if rows.lengths[b] < N:
                    keep.append(b)
                    continue
                order = rows.order[b, :N].argsort()
                stats = self._stats(rows, emitted[rows.row[b]], time.perf_counter() - started)
                results[rows.row[b]] = ImageResult(
                    rows.patches[b, :N][order].clone(),
                    int(rows.label[b]),
                    rows.accepted[b, :N][order].clone(),
                    stats,
                )
            if len(keep) < len(rows.row):
                rows.select(keep) if keep else rows.row.clear()
        return results

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

    def _stats(self, rows: PatchRows, emitted: list[int], seconds: float) -> Stats:
        target, drafter = rows.networks["target"], rows.networks.get("drafter")
        stats = Stats(emitted=emitted, target_passes=target.passes, target_s=target.seconds)
        if drafter is not None:
            stats.drafter_passes, stats.drafter_s = drafter.passes, drafter.seconds
        stats.sampler_s = seconds - stats.target_s - stats.drafter_s
        return stats


def load(path: str, config: dict, *, target: str | None, dtype: str, device: str):
    """The sampler of an exported target (see `decoding.load`), or of the one a drafter names."""
    return SequentialSampler(patches.load(target or path, dtype).to(device))
