"""Decoding of images as continuous tokens: parameters, results, batch state and cached network."""

from dataclasses import dataclass
from typing import Any, Literal, get_type_hints

import torch
from torch import Tensor

from data.arguments import Positive
from decoding.continuous.options import GUIDANCE, IMAGE_VERIFY
from decoding.engine.cache import CountedNetwork, RaggedCache
from decoding.engine.params import Stats
from decoding.engine.randomness import ContinuousRandomness
from decoding.method import Amount, Count, Share, check_values
from models.attention import cache_argument
from models.masks import Layout, causal, dense
from models.patches import PatchTransformer


@dataclass(frozen=True)
class ImageParams:
    """Sampling parameters of images.

    Attributes:
        temperature: Factor of the noise of every step.
        guidance: Scale of classifier-free guidance; 1 switches it off.
        guidance_schedule: 'constant', or 'linear' (MAR's), from 1 at the first token to the scale.
        seed: Seed of the first image; those of further images are derived from it. None draws one.
        gamma: Tokens drafted per cycle; None takes the export's number.
        prefill: Share of the tokens, at the start, without drafts; None takes the export's number.
        verify: 'exact', or 'relaxed', the published rule, which is lossy and needs `lossy`.
        lossy: Allow a lossy rule.
        inner_temperature: Of the relaxed rule: 42 in the authors' code, 1 in the paper.
        align: Share noise between the drafter's chain and the target's (`denoising_chains.follow`).
        coupled: How many of the last steps are coupled (`denoising_chains.follow`).
    """

    temperature: Positive = 1.0
    guidance: Amount = 1.0
    guidance_schedule: Literal[*GUIDANCE] = "constant"
    seed: int | None = None
    gamma: Count | None = None
    prefill: Share | None = None
    verify: Literal[*IMAGE_VERIFY] = "exact"
    lossy: bool = False
    inner_temperature: Positive = 1.0
    align: bool = True
    coupled: Count | None = None

    def __post_init__(self):
        check_values(_PARAMS, vars(self))
        if self.verify == "relaxed" and not self.lossy:
            raise ValueError(
                "verify='relaxed' changes the distribution of the images: allow it with "
                "lossy=true, or use verify=exact"
            )


_PARAMS = get_type_hints(ImageParams, include_extras=True)


@dataclass
class ImageResult:
    """One generated image: patches [N, D] in raster order, and which are accepted drafts, bool [N].

    Its `stats.emitted` counts tokens per target pass.
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
        order: Positions in the order of generation, [B, capacity]; the last is repeated at the end.
        patches: [B, capacity, D] in that order.
        lengths: Number of committed patches, [B].
        accepted: Which patches are accepted drafts, bool [B, capacity].
        networks: 'target', then 'drafter': a `PatchNetwork` or a `prefixes.PrefixNetwork`.
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
        self.networks: dict[str, Any] = {}

    def append(self, patches: Tensor, counts: Tensor, accepted: Tensor) -> None:
        """Commit the first counts [B] of patches [B, m, D]; accepted [B, m] marks drafted ones."""
        slots = self.lengths[:, None] + torch.arange(patches.shape[1], device=counts.device)
        here = torch.arange(len(counts), device=counts.device)[:, None]
        # Entries after a row's length are undefined, so the surplus may be written too.
        self.patches[here, slots], self.accepted[here, slots] = patches, accepted
        self.lengths = self.lengths + counts

    def select(self, keep: list[int]) -> None:
        """Keep only these rows of the batch, by index."""
        rows = torch.tensor(keep, device=self.lengths.device)
        for network in self.networks.values():
            network.keep(rows, len(self.requests))
        self.requests = [self.requests[b] for b in keep]
        for name in self.TENSORS:
            setattr(self, name, getattr(self, name)[rows])
        self.randomness.select(rows)

    def replace(self, done: list[int], fresh: "ImageBatch") -> None:
        """Replace finished rows by fresh ones; masks hide the old cache contents."""
        rows = torch.tensor(done, device=self.lengths.device)
        for b, number in zip(done, fresh.requests):
            self.requests[b] = number
        for name in self.TENSORS:
            getattr(self, name)[rows] = getattr(fresh, name)
        self.randomness.replace(rows, fresh.randomness)


class PatchNetwork(CountedNetwork):
    """A patch transformer with a ragged KV cache.

    With `free` each row runs a second time without its class, for guidance.
    """

    uncounted = 0  # of the tokens, in the schedule of guidance: `guidance_scale`

    def __init__(self, network: PatchTransformer, capacity: int, free: bool):
        super().__init__(network)
        self.free = free
        self.cache: RaggedCache = RaggedCache(capacity, network.backbone.config.num_hidden_layers)

    def __call__(
        self, batch: ImageBatch, index: Tensor, keep: int = 0
    ) -> tuple[Tensor, Tensor | None]:
        """Return hidden states z [B, keep, H], and those without the class (None unless `free`).

        `index` [B, n] is into the order of generation; the last `keep` are returned, all for 0.
        """
        inputs = self.inputs(batch, index, batch.label)
        if self.free:
            no_class = torch.full_like(batch.label, self.network.config.classes)
            inputs = torch.cat([inputs, self.inputs(batch, index, no_class)])
            index = index.repeat(2, 1)
        keys = torch.arange(int(index.max()) + 1, device=index.device)[None]
        q, k = (Layout(torch.zeros_like(i), i, torch.zeros_like(i) - 1) for i in (index, keys))
        self.cache.place(index, keys.shape[1])
        with self.counted():
            z = self.network.backbone(
                inputs_embeds=inputs,
                attention_mask=dense(causal, q, k),
                position_ids=index,
                **{cache_argument(self.network.backbone): self.cache},
                use_cache=True,
            ).last_hidden_state[:, -keep:]
        return tuple(z.chunk(2)) if self.free else (z, None)

    def inputs(self, batch: ImageBatch, index: Tensor, label: Tensor) -> Tensor:
        """Embed the inputs at index [B, n]: the patch before, or the class at index 0."""
        before = (index - 1).clamp_min(0)
        here = torch.arange(len(index), device=index.device)[:, None]
        following = batch.order.gather(1, index)
        patches = batch.patches[here, before]
        tokens = self.network.embed_patches(patches, batch.order.gather(1, before), following)
        start = self.network.embed_class(label, following)
        return torch.where((index == 0)[..., None], start, tokens)

    def keep(self, rows: Tensor, batch: int) -> None:
        """Keep these rows of a batch of so many, in this order."""
        self.cache.select(torch.cat([rows, rows + batch]) if self.free else rows)


def guidance_scale(index: Tensor, tokens: int, params: ImageParams, uncounted: int = 0) -> Tensor:
    """Return the scale of classifier-free guidance at indices i of the order, float64 [...].

    With scale s 'linear' is MAR's, 1 + (s - 1) (i + 1) / N for N tokens; the last `uncounted`
    tokens share the scale of the one before (MAR's program has 1).
    """
    if params.guidance_schedule == "constant":
        return torch.full_like(index, params.guidance, dtype=torch.float64)
    counted = (index + 1).clamp_max(tokens - uncounted).double()
    return 1 + (params.guidance - 1) * counted / tokens
