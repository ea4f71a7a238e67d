"""Decoding of images as continuous tokens: parameters, results, batch state and cached network."""

from dataclasses import dataclass

import torch
from torch import Tensor

from decoding.engine.cache import CountedNetwork, RaggedCache
from decoding.engine.params import Stats
from decoding.engine.randomness import ContinuousRandomness
from models.masks import Layout, causal, dense
from models.patches import PatchTransformer

IMAGE_VERIFY = ("exact", "relaxed")
GUIDANCE = ("constant", "linear")


@dataclass(frozen=True)
class ImageParams:
    """Sampling parameters of images.

    Attributes:
        temperature: Factor of the noise of every step.
        guidance: Scale of classifier-free guidance; 1 switches it off.
        guidance_schedule: 'constant', or 'linear' (MAR's), from 1 at the first token to the scale.
        seed: Seed of the first image; those of further images are derived from it. None draws one.
        gamma: Tokens drafted per cycle; None takes the export's number.
        prefill: Share of the tokens, at the start, that the target generates without drafts; None
            takes the export's number.
        verify: 'exact', or 'relaxed', the published rule, which is lossy and needs `lossy`.
        lossy: Allow a lossy rule.
        inner_temperature: Of the relaxed rule: 42 in the authors' code, 1 in the paper.
        align: Share noise between the drafter's chain and the target's (`denoising_chains.follow`).
        coupled: How many of the last steps are coupled (`denoising_chains.follow`).

    Raises:
        ValueError: A value is out of range, or `verify` is lossy without `lossy`.
    """

    temperature: float = 1.0
    guidance: float = 1.0
    guidance_schedule: str = "constant"
    seed: int | None = None
    gamma: int | None = None
    prefill: float | None = None
    verify: str = "exact"
    lossy: bool = False
    inner_temperature: float = 1.0
    align: bool = True
    coupled: int | None = None

    def __post_init__(self):
        allowed = [
            (self.temperature > 0, "temperature", "positive: without noise there is no density"),
            (self.guidance >= 0, "guidance", "0 or a positive number; 1 is off"),
            (self.guidance_schedule in GUIDANCE, "guidance_schedule", f"one of {list(GUIDANCE)}"),
            (self.gamma is None or self.gamma >= 1, "gamma", "at least 1"),
            (self.prefill is None or 0 <= self.prefill <= 1, "prefill", "in [0, 1]"),
            (self.verify in IMAGE_VERIFY, "verify", f"one of {list(IMAGE_VERIFY)}"),
            (self.inner_temperature > 0, "inner_temperature", "a positive number"),
            (self.coupled is None or self.coupled >= 1, "coupled", "at least 1 step"),
        ]
        for ok, name, rule in allowed:
            if not ok:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} is not allowed: it must be {rule}"
                )
        if self.verify == "relaxed" and not self.lossy:
            raise ValueError(
                "verify='relaxed' changes the distribution of the images: allow it with "
                "lossy=true, or use verify=exact"
            )


@dataclass
class ImageResult:
    """One generated image.

    Attributes:
        patches: [N, D], in raster order.
        label: The class.
        accepted: Which patches are accepted drafts, bool [N].
        stats: Passes and seconds; `emitted` counts tokens per target pass.
    """

    patches: Tensor
    label: int
    accepted: Tensor
    stats: Stats


class ImageBatch:
    """The unfinished images of a batch, one per row.

    Attributes:
        requests: The index of each image in the call.
        label: Classes [B].
        order: Positions in the order of generation, [B, capacity]; after the end the last again.
        patches: [B, capacity, D] in that order.
        lengths: How many of the patches are committed, [B].
        accepted: Which patches are accepted drafts, bool [B, capacity].
        randomness: What each row draws from.
        networks: The networks, 'target' and 'drafter' (`decoding.continuous.prefixes`).
    """

    TENSORS = ("label", "order", "patches", "accepted", "lengths")

    def __init__(
        self,
        label: Tensor,
        order: Tensor,
        patches: Tensor,
        randomness: ContinuousRandomness,
        requests: list[int],
    ):
        B, capacity = patches.shape[:2]
        padding = order[:, -1:].expand(B, capacity - order.shape[1])
        self.requests = requests
        self.label, self.order, self.patches = label, torch.cat([order, padding], 1), patches
        self.accepted = torch.zeros_like(self.order, dtype=torch.bool)
        self.lengths = torch.zeros_like(label)
        self.randomness = randomness
        self.networks: dict[str, CountedNetwork] = {}

    def append(self, patches: Tensor, counts: Tensor, accepted: Tensor) -> None:
        """Commit the first counts [B] of patches [B, m, D], accepted [B, m] from the draft."""
        slots = self.lengths[:, None] + torch.arange(patches.shape[1], device=counts.device)
        here = torch.arange(len(counts), device=counts.device)[:, None]
        # Entries after a row's length are undefined, so the surplus may be written too.
        self.patches[here, slots], self.accepted[here, slots] = patches, accepted
        self.lengths = self.lengths + counts

    def select(self, keep: list[int]) -> None:
        """Keep only these rows of the batch, by index."""
        rows = torch.tensor(keep, device=self.lengths.device)
        for network in self.networks.values():
            network.select(rows, len(self.requests))
        self.requests = [self.requests[b] for b in keep]
        for name in self.TENSORS:
            setattr(self, name, getattr(self, name)[rows])
        self.randomness.select(rows)

    def replace(self, done: list[int], fresh: "ImageBatch") -> None:
        """Put fresh rows in place of finished ones; masks hide what the caches hold of those."""
        rows = torch.tensor(done, device=self.lengths.device)
        for b, number in zip(done, fresh.requests):
            self.requests[b] = number
        for name in self.TENSORS:
            getattr(self, name)[rows] = getattr(fresh, name)
        self.randomness.replace(rows, fresh.randomness)


class PatchNetwork(CountedNetwork):
    """A patch transformer with a ragged KV cache.

    Args:
        network: The transformer.
        capacity: Slots of the cache.
        free: Run each row a second time without its class, for guidance.
    """

    uncounted = 0  # of the tokens, in the schedule of guidance: `guidance_scale`

    def __init__(self, network: PatchTransformer, capacity: int, free: bool):
        super().__init__(network)
        self.free = free
        self.cache = RaggedCache(capacity, network.backbone.config.num_hidden_layers)

    def __call__(
        self, batch: ImageBatch, index: Tensor, keep: int = 0
    ) -> tuple[Tensor, Tensor | None]:
        """The hidden states that the head conditions on.

        Args:
            batch: The unfinished requests.
            index: Indices into the order of generation, [B, n].
            keep: Tokens, the last ones, that are wanted; 0 is all.

        Returns:
            z [B, keep, H], and z without the class (None unless `free`).
        """
        if self.free:
            no_class = torch.full_like(batch.label, self.network.config.classes)
            inputs = torch.cat([self.inputs(batch, index, c) for c in (batch.label, no_class)])
            index = index.repeat(2, 1)
        else:
            inputs = self.inputs(batch, index, batch.label)
        keys = torch.arange(int(index.max()) + 1, device=index.device)[None]
        q, k = (Layout(torch.zeros_like(i), i, torch.zeros_like(i) - 1) for i in (index, keys))
        self.cache.place(index, keys.shape[1])
        with self.counted():
            z = self.network.backbone(
                inputs_embeds=inputs,
                attention_mask=dense(causal, q, k),
                position_ids=index,
                past_key_values=self.cache,
                use_cache=True,
            ).last_hidden_state[:, -keep:]
        return tuple(z.chunk(2)) if self.free else (z, None)

    def inputs(self, batch: ImageBatch, index: Tensor, label: Tensor) -> Tensor:
        """Input embeddings [B, n, H] at index [B, n]: the patch before, or the class at index 0."""
        before = (index - 1).clamp_min(0)
        here = torch.arange(len(index), device=index.device)[:, None]
        following = batch.order.gather(1, index)
        patches = batch.patches[here, before]
        tokens = self.network.embed_patches(patches, batch.order.gather(1, before), following)
        start = self.network.embed_class(label, following)
        return torch.where((index == 0)[..., None], start, tokens)

    def select(self, rows: Tensor, batch: int) -> None:
        """Keep only these rows of the batch."""
        self.cache.select(torch.cat([rows, rows + batch]) if self.free else rows)


def guidance_scale(index: Tensor, tokens: int, params: ImageParams, uncounted: int = 0) -> Tensor:
    """The scale of classifier-free guidance of each token.

    Args:
        index: Indices i into the order of generation, [...].
        tokens: Tokens N of an image.
        params: Its scale s and schedule; 'linear' is MAR's, 1 + (s - 1) (i + 1) / N.
        uncounted: Tokens at the end with the scale of the one before; MAR's program has 1.

    Returns:
        float64 [...].
    """
    scale = torch.full_like(index, params.guidance, dtype=torch.float64)
    if params.guidance_schedule == "linear":
        scale = (
            1 + (params.guidance - 1) * (index + 1).clamp_max(tokens - uncounted).double() / tokens
        )
    return scale
